"""Which store a process uses and how: declared variables, and over them what a `use_store` block says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rung import config
from rung.cache.store import Store
from rung.counters import Counters
from rung.errors import ConfigError

Mode = Literal["read-write", "read-only", "off"]
Trust = Literal["owner", "any"]
DEFAULT_BUDGET_BYTES = 32 * 2**30
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How a store is used. Frozen."""

    root: Path
    bases: tuple[Path, ...] = ()  # stores that are read below `root` and never written
    mode: Mode = "read-write"  # "off": no file under any of the folders is touched
    budget_bytes: int | None = DEFAULT_BUDGET_BYTES  # least recently used entries go first; None: no limit
    trust: Trust = "owner"  # "any": also what other users own or may write
    require_hit: bool = False  # raise `CacheMissError` instead of compiling
    lock_seconds: float = 600.0  # how long to wait for another process that builds the same

    @staticmethod
    def from_environment() -> StoreSettings:
        bases = config.variable("RUNG_CACHE_BASE")
        budget = config.variable("RUNG_CACHE_BYTES")
        return StoreSettings(
            root=config.cache_dir(),
            bases=tuple(Path(part) for part in (bases or "").split(os.pathsep) if part),
            mode=_one_of("RUNG_CACHE_MODE", get_args(Mode)),
            budget_bytes=DEFAULT_BUDGET_BYTES if budget is None else parse_bytes(budget, "RUNG_CACHE_BYTES"),
            trust=_one_of("RUNG_CACHE_TRUST", get_args(Trust)),
            require_hit=config.variable("RUNG_REQUIRE_HIT") not in (None, "0"),
        )


_block: ContextVar[StoreSettings | None] = ContextVar("rung_store_settings", default=None)


def store_settings() -> StoreSettings:
    """Those of the innermost `use_store` block, or of the environment."""
    return _block.get() or StoreSettings.from_environment()


@contextmanager
def use_store(**changes: Any) -> Iterator[StoreSettings]:
    """Use other settings (fields of `StoreSettings`) inside the block, in this thread."""
    token = _block.set(replace(store_settings(), **changes))
    try:
        yield store_settings()
    finally:
        _block.reset(token)


def open_store(counters: Counters | None = None) -> Store:
    """The store of the current settings. Touches no file before it is used."""
    settings = store_settings()
    off = settings.mode == "off"
    return Store(
        None if off else settings.root,
        bases=() if off else settings.bases,
        read_only=settings.mode == "read-only",
        any_owner=settings.trust == "any",
        budget_bytes=settings.budget_bytes,
        require_hit=settings.require_hit,
        lock_seconds=settings.lock_seconds,
        counters=counters,
    )


def parse_bytes(text: str, name: str) -> int | None:
    """A size such as "20G" or "500MiB"; "none" is no limit. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if text.strip().lower() == "none":
        return None
    if match is None:
        raise ConfigError(f"{name}: {text!r} is no size", hint="write for example 500M, 20G or none")
    return int(float(match[1]) * _UNITS[match[2]])


def _one_of(name: str, allowed: tuple[Any, ...]) -> Any:
    value = config.variable(name) or allowed[0]
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}", hint=f"leave it unset for {allowed[0]!r}")
    return value
