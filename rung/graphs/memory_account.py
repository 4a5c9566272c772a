"""The manager's books of memory: what comes next, what it took, what must go."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from rung.graphs.capture_report import CaptureEntry
from rung.graphs.descriptor import Descriptor
from rung.graphs.memory import MemoryModel, MemoryReport, probes
from rung.graphs.memory_budget import MemoryBudget, trim
from rung.graphs.planned import capture_order

_log = logging.getLogger(__name__)


class MemoryAccount:
    """Orders captures, fits the model once the probes are captured, and trims. Captures nothing itself: the manager asks for `next`,
    reports with `add` or `drop`, and releases when `withdrawn` says so. Not thread-safe: the manager's lock covers it."""

    def __init__(self, budget: MemoryBudget | None, executable_cost: tuple[float, float] | None = None) -> None:
        self.budget = budget
        self._executable_cost = executable_cost
        self.model: MemoryModel | None = None
        self.entries: dict[Descriptor, CaptureEntry] = {}  # of captured descriptors, in capture order
        self.trimmed: set[Descriptor] = set()
        self._planned: list[Descriptor] = []
        self._queue: deque[Descriptor] = deque()
        self._probes: set[Descriptor] = set()  # still to come
        self._fit_due = False
        self._shared_pool = True

    def begin(self, descriptors: Sequence[Descriptor], *, largest_first: bool, shared_pool: bool, model: MemoryModel | None = None) -> None:
        """Plan captures of `descriptors`: in their order, or the probes first and all by size."""
        descriptors = [one for one in descriptors if one not in self.trimmed]
        self._shared_pool = shared_pool
        self._fit_due = model is None
        first = probes(descriptors) if model is None else ()
        if largest_first:
            rest = set(descriptors).difference(first)
            self._queue = deque([*capture_order(first), *capture_order(rest)])
        else:
            self._queue = deque(descriptors)
        self._probes = set(first)
        self.foresee(descriptors, model)

    def foresee(self, descriptors: Sequence[Descriptor], model: MemoryModel | None) -> None:
        """`descriptors` will be captured, now or later; a model trims them ahead."""
        self._planned += [one for one in descriptors if one not in self._planned]
        if model is not None:
            self.model = model
            self._trim()

    def next(self) -> Descriptor | None:
        """The descriptor to capture now, None at the end. One that is predicted not to fit is trimmed on the way."""
        while self._queue:
            descriptor = self._queue.popleft()
            if descriptor not in self.trimmed and self._admits(descriptor):
                return descriptor
        return None

    def add(self, entry: CaptureEntry) -> None:
        """A capture has come; see `withdrawn` afterwards."""
        self.entries[entry.descriptor] = entry
        if self.budget is not None and self.pool_bytes + self.executable_bytes > self.budget.limit_bytes:
            self._note([entry.descriptor])
        self._settle(entry.descriptor)

    def drop(self, descriptor: Descriptor) -> None:
        """A capture has failed."""
        self._planned.remove(descriptor)
        self._settle(descriptor)

    def withdrawn(self) -> bool:
        """Whether a captured descriptor was trimmed since: then all are released, and `start_over` follows."""
        return not self.trimmed.isdisjoint(self.entries)

    def start_over(self) -> None:
        """All graphs and the pool were released: what was captured and not trimmed comes again, before the rest."""
        self._queue.extendleft(reversed([one for one in self.entries if one not in self.trimmed]))
        self.entries.clear()

    def forget(self) -> None:
        """All graphs were released for good. The model stays: it still tells what they would take."""
        self.entries.clear()
        self.trimmed.clear()
        self._planned.clear()
        self._queue.clear()

    @property
    def pool_bytes(self) -> int:
        return sum(entry.pool_bytes for entry in self.entries.values())

    @property
    def executable_bytes(self) -> int:
        return max(sum(entry.executable_bytes for entry in self.entries.values()), 0)

    def report(self, pool_bytes: int, buffer_bytes: int, nodes_missing: str | None) -> MemoryReport:
        wanted = [one for one in self._planned if one not in self.trimmed]
        return MemoryReport(
            pool_bytes=pool_bytes,
            executable_bytes=self.executable_bytes,
            buffer_bytes=buffer_bytes,
            entries=tuple(self.entries.values()),
            trimmed=capture_order(self.trimmed),
            predicted=None if self.model is None else self.model.predict(wanted),
            budget_bytes=None if self.budget is None else self.budget.limit_bytes,
            model=self.model,
            nodes_missing=nodes_missing,
        )

    def _settle(self, descriptor: Descriptor) -> None:
        """The model is fitted to the probes alone, so that the others show what it is worth."""
        self._probes.discard(descriptor)
        if self._fit_due and not self._probes and self.entries:
            self._fit_due = False
            self.model = MemoryModel.fit(list(self.entries.values()), shared_pool=self._shared_pool, executable_cost=self._executable_cost)
            self._trim()

    def _admits(self, descriptor: Descriptor) -> bool:
        """Whether the budget holds one more. Without a model the capture itself must show."""
        if self.budget is None or self.model is None:
            return True
        have = [one for one in self.entries if one not in self.trimmed]
        if self.model.predict([*have, descriptor]).total_bytes <= self.budget.limit_bytes:
            return True
        self._note([descriptor])
        return False

    def _trim(self) -> None:
        if self.budget is None or self.model is None:
            return
        wanted = [one for one in self._planned if one not in self.trimmed]
        if self.model.predict(wanted).total_bytes > self.budget.limit_bytes:
            self._note(trim(wanted, self.model, self.budget))

    def _note(self, descriptors: Sequence[Descriptor]) -> None:
        assert self.budget is not None
        self.trimmed.update(descriptors)
        names = ", ".join(f"({one})" for one in descriptors)
        _log.warning(
            "no graphs for %d sizes, to stay within %d bytes of graph memory: %s", len(descriptors), self.budget.limit_bytes, names
        )
