"""Seconds of the phases between the start of a command and its first result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Phases:
    """Named durations in the order in which they began; a phase that comes twice adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.seconds.setdefault(name, 0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_compile(self, seconds: Mapping[str, float]) -> None:
        """The phases of a compile report, whichever way it went. Imports are a row of their own: a process pays for them once."""
        rows = {
            "import compiler": ("import Dynamo", "import Inductor"),
            "trace": ("trace",),
            "compile": ("keys", "rows", "split", "compile", "save"),
            "check": ("build kernels", "compare once"),
            "load artifacts": ("read plan", "read and verify", "load pieces", "bind"),
        }
        for row, names in rows.items():
            self.add(row, sum(seconds.get(name, 0.0) for name in names))
