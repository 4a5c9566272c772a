"""Keeps finalisers that free device memory out of a capture, which they could invalidate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# What was given back while a capture of this thread was open. Ambient, because a finaliser belongs to whatever runs when it runs.
_parked: ContextVar[list[Callable[[], object]] | None] = ContextVar("rung_parked_finalisers", default=None)


@contextmanager
def finalisers_parked() -> Iterator[None]:
    """Inside the block the collector does not run, and what `finalise` is given waits for the end of the outermost block."""
    if _parked.get() is not None:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    waiting: list[Callable[[], object]] = []
    token = _parked.set(waiting)
    try:
        yield
    finally:
        _parked.reset(token)
        if collects:
            gc.enable()
        for free in waiting:
            free()


def finalise(free: Callable[[], object]) -> None:
    """Call `free` now, or when the capture has ended."""
    waiting = _parked.get()
    if waiting is None:
        free()
    else:
        waiting.append(free)
