"""What captures cost, by descriptor and by phase."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rung.errors import CaptureError
from rung.graphs.backends.base import NodeCounts
from rung.graphs.descriptor import Descriptor

if TYPE_CHECKING:
    from rung.graphs.memory import MemoryReport


@dataclass(frozen=True, slots=True)
class CaptureEntry:
    """One descriptor's cost. `pool_bytes` is what the pool grew by, `num_graphs` the graphs of its program, `nodes` None where they are not
    counted. `executable_bytes` is a difference of readings: a driver hands memory to graphs in pieces of its own size, so that a single
    figure may be off by one piece while the sum is right."""

    descriptor: Descriptor
    seconds: float
    pool_bytes: int
    num_graphs: int
    executable_bytes: int = 0
    nodes: NodeCounts | None = None
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds

    @property
    def num_nodes(self) -> int | None:
        return None if self.nodes is None else self.nodes.total


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What a call of `capture` did, in capture order."""

    entries: tuple[CaptureEntry, ...]
    failures: tuple[CaptureError, ...]
    seconds: float
    pool_bytes: int  # held by the pool now, over all captures so far
    memory: MemoryReport | None = None  # of all captures so far

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, over all entries."""
        total: dict[str, float] = {}
        for entry in self.entries:
            for name, seconds in entry.phases.items():
                total[name] = total.get(name, 0.0) + seconds
        return total


class Clock:
    """Seconds by phase: `lap` ends one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start
