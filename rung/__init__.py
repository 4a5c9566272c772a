"""rung: trace once, compile the unique pieces, ship the artifacts, capture a ladder of graphs, replay.

Public names are imported when they are first used, so that `import rung` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rung.versions import check_versions

check_versions()

# Imported now, since importing the submodule later would put the module itself under this name.
from rung.counters import counters  # noqa: E402 - an old Python cannot import it

__version__ = "0.1.0"

_PUBLIC = {
    "compiled": "rung.api",
    "wrap": "rung.api",
    "eager_break": "rung.compile.eager_break",
    "errors": "rung.errors",
    "Engine": "rung.runner",
    "SamplingParams": "rung.runner",
    "ModelRunner": "rung.runner",
}

__all__ = ["__version__", "counters", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rung' has no attribute {name!r}")
    module = import_module(_PUBLIC[name])
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
