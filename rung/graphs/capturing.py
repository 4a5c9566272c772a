"""The captures of one manager: programs by descriptor in one pool, and the books of what they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from rung.compile.bound import BoundPlan
from rung.counters import Count, Counters
from rung.errors import CaptureError
from rung.graphs.backends.base import GraphBackend, GraphPool
from rung.graphs.capture import capture_program, warm_up
from rung.graphs.capture_report import CaptureEntry, CaptureReport, Clock
from rung.graphs.descriptor import Descriptor, GraphMode
from rung.graphs.memory import MemoryModel
from rung.graphs.memory_account import MemoryAccount
from rung.graphs.memory_budget import MemoryBudget
from rung.graphs.program import ReplayProgram
from rung.graphs.ranges import Ranges
from rung.graphs.repeats import BreakRepeats
from rung.graphs.wanted import Wanted

Order = Literal["largest_first", "given"]


class Capturing:
    """Captures descriptors and frees them; a failure frees its own and leaves the rest. `failed` and `account.trimmed` keep their identity,
    so that a dispatcher may share them. `before` is called between warm-up and capture. Not thread-safe: the manager's lock covers it.

    Each size is warmed up and captured under the eyes of a dry run, or with `watch_all` False the first size of each mode and query length:
    watching a decoder's ladder takes as long as capturing it. The others run the code that pieces share once in their warm-up, are watched
    when it or their capture fails, and a full graph is not warmed up when a piecewise one of its size was."""

    def __init__(
        self,
        backend: GraphBackend,
        plan_of: Callable[[Descriptor], BoundPlan],
        views: Callable[[Descriptor], list[Any]],
        before: Callable[[], None],
        *,
        generators: Sequence[torch.Generator],
        counters: Counters,
        budget: MemoryBudget | None,
        ranges: Ranges | None,
        watch_all: bool,
    ) -> None:
        self.programs: dict[Descriptor, ReplayProgram] = {}
        self.failed: set[Descriptor] = set()  # those that will have no graph: failed or trimmed
        self.account = MemoryAccount(budget, backend.executable_cost)
        self.wanted = Wanted()
        self.pool: GraphPool | None = None
        self.repeats = BreakRepeats(counters)
        self.generators = tuple(generators)
        self._backend = backend
        self._plan_of = plan_of
        self._views = views
        self._before = before
        self._counters = counters
        self._ranges = ranges
        self._watch_all = watch_all
        self._watched: set[tuple[GraphMode, int | None]] = set()
        self._warm: set[int] = set()  # numbers of tokens

    @property
    def pool_bytes(self) -> int:
        return self.pool.bytes() if self.pool is not None else 0

    def plan(self, descriptors: Iterable[Descriptor], model: MemoryModel | None) -> None:
        """The descriptors will be captured at their first step; a model trims them ahead."""
        self.account.foresee(list(descriptors), model)
        self.failed.update(self.account.trimmed)

    def capture(
        self,
        descriptors: Sequence[Descriptor],
        *,
        order: Order = "largest_first",
        on_failure: str = "raise",
        model: MemoryModel | None = None,
    ) -> CaptureReport:
        """Capture now. "largest_first" begins with three sizes of each kind, from which the memory of the others is predicted unless
        `model` is given."""
        started = time.perf_counter()
        account, before = self.account, set(self.programs)
        failures: list[CaptureError] = []
        with self._backend.session(), torch.inference_mode(False), torch.no_grad():
            self.pool = self.pool or self._backend.new_pool()
            account.begin(descriptors, largest_first=order == "largest_first", shared_pool=self.pool.shares, model=model)
            while (descriptor := account.next()) is not None:
                try:
                    account.add(self._capture_one(descriptor))
                except CaptureError as error:
                    self.failed.add(descriptor)
                    failures.append(error)
                    account.drop(descriptor)
                if account.withdrawn():
                    self._withdraw()
            self.failed.update(account.trimmed)
        self._backend.synchronize()
        entries = tuple(entry for one, entry in account.entries.items() if one not in before)
        report = CaptureReport(entries, tuple(failures), time.perf_counter() - started, self.pool_bytes)
        if failures and on_failure == "raise":
            if len(failures) > 1:
                failures[0].add_note(f"{len(failures) - 1} more captures failed, sizes {[error.size for error in failures[1:]]}")
            raise failures[0]
        return report

    def program(self, descriptor: Descriptor) -> ReplayProgram:
        """The program of a descriptor that was just captured. Raises `CaptureError` when the budget has trimmed it."""
        if descriptor in self.account.trimmed:
            raise CaptureError(
                f"the graph of ({descriptor}) does not fit the memory budget",
                hint="raise the budget, or dispatch again: `manager.failed` holds the descriptor now",
                size=descriptor.num_tokens,
            )
        return self.programs[descriptor]

    def free(self) -> None:
        """Free all graphs and the pool."""
        if self.programs:
            self._backend.synchronize()  # a graph may still be running, and its memory is about to be somebody else's
        self._drop_programs()
        self.repeats.memory.release()
        self._watched.clear()
        self._warm.clear()
        self.failed.difference_update(self.account.trimmed)
        self.account.forget()

    def _capture_one(self, descriptor: Descriptor) -> CaptureEntry:
        pool = self.pool = self.pool or self._backend.new_pool()
        plan, inputs = self._plan_of(descriptor), self._views(descriptor)
        clock = Clock()
        with self.wanted.prepare(descriptor):
            clock.lap("prepare")
            kind = (descriptor.mode, descriptor.uniform_query_len)
            watch = self._watch_all or kind not in self._watched
            is_warm = not watch and descriptor.num_tokens in self._warm
            if not is_warm:
                try:
                    warm_up(plan, self._backend.device, descriptor, inputs, self.generators, watch=watch)
                except CaptureError:
                    if watch:
                        raise
                    watch = True  # a break may have been given what another piece had made: now every piece runs
                    warm_up(plan, self._backend.device, descriptor, inputs, self.generators)
            clock.lap("warm-up")
            self._before()
            others_before = pool.executable_bytes()
            clock.lap("account")
            try:
                program = capture_program(plan, self._backend, pool, descriptor, inputs, self.generators, watch=watch, repeats=self.repeats)
            except CaptureError:
                if watch:
                    raise
                # Another run may name the line, or load what was not there yet; what fails again is refused.
                warm_up(plan, self._backend.device, descriptor, inputs, self.generators)
                program = capture_program(plan, self._backend, pool, descriptor, inputs, self.generators, repeats=self.repeats)
            self._watched.add(kind)
            if descriptor.mode is GraphMode.PIECEWISE:
                self._warm.add(descriptor.num_tokens)
            clock.lap("capture")
        clock.lap("prepare")
        if self._ranges is not None:
            self._ranges.mark(program, descriptor)
        self.programs[descriptor] = program
        self.wanted.captured(descriptor)
        self.failed.discard(descriptor)
        self._counters.add(Count.CAPTURES)
        self._counters.add(Count.LAUNCHED_PIECES, program.pieces_launched)
        for reason, count in program.graph_reasons.items():
            self._counters.add(reason.counter, count)
        pool_bytes, executable_bytes = pool.bytes() - self.account.pool_bytes, pool.executable_bytes() - others_before
        clock.lap("account")
        return CaptureEntry(descriptor, clock.total, pool_bytes, program.num_graphs, executable_bytes, program.nodes, clock.seconds)

    def _withdraw(self) -> None:
        """Give up graphs for the budget. The pool keeps the memory of its largest user, so everything starts anew in another one."""
        self._drop_programs()
        self._backend.reclaim()
        self.account.start_over()

    def _drop_programs(self) -> None:
        for program in self.programs.values():
            program.release()
        self.programs.clear()
        self.pool = None
