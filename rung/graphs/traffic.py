"""Capture by traffic: a graph is captured once steps have asked for it often enough.

A capture cannot run beside replays of the same pool: it rewrites memory that they use, and the device would have to be shared. So there is
no thread that captures; the owner of the steps calls `capture_due` between two of them, with a budget of time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from typing import Any

from rung.graphs.descriptor import Descriptor, GraphMode, Shape, exact
from rung.graphs.dispatch import Dispatch, Dispatcher
from rung.graphs.manager import GraphManager
from rung.graphs.reasons import Reason


class Traffic:
    """Counts how often each graph was missed. `after`: it is due from that many times on. Not thread-safe."""

    def __init__(self, after: int) -> None:
        self.after = after
        self._missed: Counter[Descriptor] = Counter()
        self._last_seconds = 0.0  # of one capture

    def miss(self, descriptor: Descriptor) -> bool:
        """Count one step that would have run in `descriptor`; whether it is due now."""
        self._missed[descriptor] += 1
        return self._missed[descriptor] >= self.after

    def drop(self, descriptor: Descriptor) -> None:
        """It was captured, or cannot be."""
        del self._missed[descriptor]

    @property
    def due(self) -> list[Descriptor]:
        """What was missed often enough, the most frequent first."""
        return [descriptor for descriptor, count in self._missed.most_common() if count >= self.after]

    def capture_due(self, capture: Callable[[Descriptor], Any], seconds: float | None = None) -> int:
        """Capture what is due, one graph after the other; returns how many. With a budget of `seconds` the first begins in any case, as a
        capture cannot be divided, and another only when one as long as the last would still fit."""
        started, done = time.perf_counter(), 0
        for descriptor in self.due:
            begun = time.perf_counter()
            if done and seconds is not None and begun - started + self._last_seconds > seconds:
                break
            self.drop(descriptor)
            capture(descriptor)
            self._last_seconds = time.perf_counter() - begun
            done += 1
        return done


class _Unavailable(Set[Descriptor]):
    """Planned descriptors without a graph."""

    def __init__(self, planned: Iterable[Descriptor], can_replay: Callable[[Descriptor], bool]) -> None:
        self._planned = frozenset(planned)
        self._can_replay = can_replay

    def __contains__(self, descriptor: object) -> bool:
        return isinstance(descriptor, Descriptor) and not self._can_replay(descriptor)

    def __iter__(self) -> Iterator[Descriptor]:
        return (descriptor for descriptor in self._planned if descriptor in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LiveDispatcher:
    """Chooses among the graphs that exist now. `make` builds the dispatcher of all `planned` descriptors but those in the set it is given.

    While the graphs are suspended a step runs without, with the reason SUSPENDED. With `traffic` a step whose best graph was not captured
    yet is counted and takes the next best that was, larger or of a lower mode, with the reason CAPTURE_PENDING."""

    def __init__(
        self,
        planned: Iterable[Descriptor],
        make: Callable[[Set[Descriptor]], Dispatcher],
        manager: GraphManager,
        traffic: Traffic | None = None,
    ) -> None:
        self._manager = manager
        self._all = make(manager.failed)
        self._ready = make(_Unavailable(planned, manager.can_replay))
        self.traffic = traffic

    def dispatch(self, shape: Shape, *, best: GraphMode = GraphMode.FULL) -> Dispatch:
        """As `Dispatcher.dispatch`."""
        wished = self._all.dispatch(shape, best=best)
        if wished.descriptor.mode is GraphMode.NONE or self._manager.can_replay(wished.descriptor):
            return wished
        if self._manager.is_suspended:
            return Dispatch(exact(shape), Reason.SUSPENDED)
        if self.traffic is None:
            return wished  # planned to be captured at its first step
        self.traffic.miss(wished.descriptor)
        return replace(self._ready.dispatch(shape, best=best), reason=Reason.CAPTURE_PENDING)
