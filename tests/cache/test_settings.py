from __future__ import annotations

import os
from pathlib import Path

import pytest

from rung.cache import StoreSettings, open_store, store_settings, use_store
from rung.cache.settings import parse_bytes
from rung.errors import ConfigError


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DIR": "/a", "BASE": f"/b{os.pathsep}/c", "BYTES": "2G", "MODE": "read-only", "TRUST": "any"}.items():
        monkeypatch.setenv(f"RUNG_CACHE_{name}", value)
    monkeypatch.setenv("RUNG_REQUIRE_HIT", "1")
    bases = (Path("/b"), Path("/c"))
    wanted = StoreSettings(root=Path("/a"), bases=bases, mode="read-only", budget_bytes=2**31, trust="any", require_hit=True)
    assert store_settings() == wanted


def test_a_block_wins_and_ends(rung_cache_dir: Path) -> None:
    with use_store(mode="off"), use_store(require_hit=True) as settings:
        assert (settings.mode, settings.require_hit) == ("off", True)
        assert open_store().layers == []
    assert store_settings() == StoreSettings(root=rung_cache_dir)


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("20G", 20 * 2**30), ("1.5 MiB", 3 * 2**19), ("7kb", 7 * 2**10), ("none", None)])
def test_sizes(text: str, size: int | None) -> None:
    assert parse_bytes(text, "--bytes") == size


@pytest.mark.parametrize(("name", "value"), [("RUNG_CACHE_MODE", "on"), ("RUNG_CACHE_TRUST", "all"), ("RUNG_CACHE_BYTES", "much")])
def test_wrong_values_are_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"(?s){name}.*{value}.*hint: "):
        store_settings()
