"""rung: trace once, compile the unique pieces, ship the artifacts, capture a ladder of graphs, replay.

Public names are imported when they are first used, so that `import rung` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rung.counters import counters  # the sum over all objects; the class and the enum stay in `rung.counters` the module

__version__ = "0.1.0"

_PUBLIC = {
    "compiled": "rung.api",
    "wrap": "rung.api",
    "Engine": "rung.runner",
    "SamplingParams": "rung.runner",
    "ModelRunner": "rung.runner",
}

__all__ = ["__version__", "counters", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rung' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
