"""The tables in which a module keeps its hooks. Their keys are counted up over all modules of a process: only the order counts."""

from __future__ import annotations

from typing import Any

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
# With which arguments and when those of `FORWARD` are called, by the same keys, and hooks that only a gradient calls.
OTHERS = (
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def how_called(module: Any, table: str) -> list[list[bool]]:
    """For each hook in one of the `FORWARD` tables, in order: whether it is given keyword arguments, whether it runs after an error too."""
    keywords, always = (getattr(module, f"{table}_{kind}", ()) for kind in ("with_kwargs", "always_called"))
    return [[key in keywords, key in always] for key in getattr(module, table)]
