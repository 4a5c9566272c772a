"""Owns the graphs of one plan: captures them, replays them, counts why each step ran as it did."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from rung.compile.bound import BoundPlan, BoundStep
from rung.counters import Count, Counters
from rung.errors import CaptureError
from rung.graphs.backends.base import GraphBackend, GraphPool
from rung.graphs.buffers import StaticBuffer
from rung.graphs.capture import capture_program, warm_up
from rung.graphs.capture_report import CaptureEntry, CaptureReport, Clock
from rung.graphs.descriptor import Descriptor, GraphMode
from rung.graphs.dispatch import Dispatch, capture_order
from rung.graphs.guard import Addresses, AddressGuard
from rung.graphs.memory import MemoryModel, MemoryReport
from rung.graphs.memory_account import MemoryAccount
from rung.graphs.memory_budget import MemoryBudget
from rung.graphs.outputs import Outputs
from rung.graphs.process import HomeProcess
from rung.graphs.program import ReplayProgram
from rung.graphs.reasons import Reason

Prepare = Callable[[Descriptor], AbstractContextManager[Any]]


@dataclass(slots=True)
class _Pending:
    prepare: Prepare
    model: MemoryModel | None = None
    descriptors: set[Descriptor] = field(default_factory=set)


def _nothing_to_prepare(descriptor: Descriptor) -> AbstractContextManager[Any]:
    return nullcontext()


class GraphManager:
    """The graphs of one plan over one set of static inputs, in one pool.

    `inputs` are the plan's inputs in order: static buffers, or values that never change. The caller writes into the buffers and then calls
    `run`. `prepare(descriptor)` is entered around the warm-up and the capture of a size: it sets the forward context with harmless metadata
    for that size and must leave what it changes as it was. `plan_of` names the plan of a descriptor that runs another one over the same
    inputs. `addresses` says what graphs read besides their inputs, and what happens when that moves: it is looked at behind each replay,
    before outputs are handed out. With a `budget`, descriptors whose graphs would not fit are trimmed.

    Outputs belong to the manager until its next step. One lock serialises everything; a replay goes to the caller's current stream."""

    def __init__(
        self,
        plan: BoundPlan,
        backend: GraphBackend,
        *,
        inputs: Sequence[Any],
        dim: str = "tokens",
        counters: Counters | None = None,
        generators: Sequence[torch.Generator] = (),
        addresses: Addresses | None = None,
        plan_of: Callable[[Descriptor], BoundPlan] | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.plan = plan
        self._plan_of = plan_of or (lambda descriptor: plan)
        self.backend = backend
        self.inputs = tuple(inputs)
        self.dim = dim
        self.counters = counters if counters is not None else Counters()
        self.failed: set[Descriptor] = set()  # those that will have no graph: failed or trimmed; a Dispatcher may share this set
        self.generation = 0  # steps run so far; outputs of an older one are stale
        self._generators = tuple(generators)
        self._guard = AddressGuard(addresses, self.inputs) if addresses is not None else None
        self._home = HomeProcess()
        self.without_graphs = False  # addresses changed under the policy "none": steps run the plan until graphs are captured again
        self._account = MemoryAccount(budget)
        self._pool: GraphPool | None = None
        self._programs: dict[Descriptor, ReplayProgram] = {}
        self._pending: _Pending | None = None
        self._prepare: Prepare = _nothing_to_prepare  # of the last capture
        self._lock = threading.RLock()

    # --- capture ---

    def capture(
        self,
        descriptors: Iterable[Descriptor],
        prepare: Prepare = _nothing_to_prepare,
        *,
        order: Literal["largest_first", "given"] = "largest_first",
        lazy: bool = False,
        on_failure: Literal["raise", "skip"] = "raise",
        model: MemoryModel | None = None,
    ) -> CaptureReport:
        """Capture each descriptor that has no graph yet. `lazy` puts it off to the first `run` of each.

        "largest_first" begins with three sizes of each kind, from which the memory of the others is predicted unless `model` is given. Then
        a budget trims what would not fit.

        A failure does not end the ladder: the rest is captured, then the first `CaptureError` is raised, or all are returned in the report
        when `on_failure` is "skip". Either way the descriptors that failed stand in `failed`."""
        with self._lock:
            self._prepare = prepare
            if not lazy:
                self._home.enter()
                self.follow_addresses()
                self.without_graphs = False
            wanted = [d for d in descriptors if d.mode is not GraphMode.NONE and d not in self._programs]
            if lazy:
                self._pending = self._pending or _Pending(prepare)
                self._pending.prepare, self._pending.model = prepare, model
                self._account.foresee(wanted, model)
                self.failed.update(self._account.trimmed)
                self._pending.descriptors.update(wanted)
                return CaptureReport((), (), 0.0, self.pool_bytes)
            with self.backend.session(), torch.inference_mode(False), torch.no_grad():  # one session: entering it collects garbage
                if self._pool is None:
                    self._pool = self.backend.new_pool()
                largest_first = order == "largest_first"
                self._account.begin(wanted, largest_first=largest_first, shared_pool=self._pool.shares, model=model)
                return self._capture_all(prepare, on_failure)

    def _capture_all(self, prepare: Prepare, on_failure: str) -> CaptureReport:
        """Capture what the account asks for."""
        started = time.perf_counter()
        account, before = self._account, set(self._programs)
        failures: list[CaptureError] = []
        self.generation += 1  # captures overwrite what replays left in the pool
        while (descriptor := account.next()) is not None:
            try:
                account.add(self._capture_one(descriptor, prepare))
            except CaptureError as error:
                self.failed.add(descriptor)
                failures.append(error)
                account.drop(descriptor)
            if account.withdrawn():
                self._withdraw()
        self.failed.update(account.trimmed)
        self.backend.synchronize()
        entries = tuple(entry for one, entry in account.entries.items() if one not in before)
        report = CaptureReport(entries, tuple(failures), time.perf_counter() - started, self.pool_bytes, self.memory())
        if failures and on_failure == "raise":
            if len(failures) > 1:
                failures[0].add_note(f"{len(failures) - 1} more captures failed, sizes {[error.size for error in failures[1:]]}")
            raise failures[0]
        return report

    def _capture_one(self, descriptor: Descriptor, prepare: Prepare) -> CaptureEntry:
        pool = self._pool = self._pool or self.backend.new_pool()
        inputs = self._views(descriptor)
        clock = Clock()
        with prepare(descriptor):
            clock.lap("prepare")
            warm_up(self._plan_of(descriptor), self.backend.device, descriptor, inputs, self._generators)
            clock.lap("warm-up")
            if self._guard is not None and self._guard.knows_nothing:
                self._guard.snapshot()
            others_before = pool.executable_bytes()
            clock.lap("account")
            program = capture_program(self._plan_of(descriptor), self.backend, pool, descriptor, inputs, self._generators)
            clock.lap("capture")
        clock.lap("prepare")
        self._programs[descriptor] = program
        self.failed.discard(descriptor)
        self.counters.add(Count.CAPTURES)
        pool_bytes, executable_bytes = pool.bytes() - self._account.pool_bytes, pool.executable_bytes() - others_before
        clock.lap("account")
        return CaptureEntry(descriptor, clock.total, pool_bytes, program.launches, executable_bytes, program.nodes, clock.seconds)

    def _withdraw(self) -> None:
        """Give up graphs for the budget. The pool keeps the memory of its largest user, so everything starts anew in another one."""
        for program in self._programs.values():
            program.release()
        self._programs.clear()
        self._pool = None
        self.backend.reclaim()
        self._account.start_over()

    # --- run ---

    def run(self, step: Dispatch | Descriptor) -> Outputs:
        """Run one step over what the buffers hold: replay the descriptor's graphs, or the plan itself at exact sizes for mode NONE.

        Raises `CaptureError` when the descriptor was neither captured nor planned lazily, `AddressChangedError` when what graphs read
        moved and the policy is to raise, or when the step cannot be repeated."""
        self._home.check()
        dispatch = step if isinstance(step, Dispatch) else Dispatch(step)
        with self._lock:
            if self._guard is None:
                return self._run(dispatch)
            if self._guard.suspect or self._guard.addresses.before_replay:
                self._follow(self._guard.sweep(everything=True))
            outputs = self._run(dispatch)
            moved = self._guard.sweep()
            if not moved:
                return outputs
            self._follow(moved, after=dispatch.descriptor)
            return self._run(dispatch)  # the outputs of stale addresses are dropped

    def _run(self, dispatch: Dispatch) -> Outputs:
        descriptor = dispatch.descriptor
        if self.without_graphs and descriptor.mode is not GraphMode.NONE:
            dispatch = replace(dispatch, descriptor=replace(descriptor, mode=GraphMode.NONE), reason=Reason.ADDRESS_CHANGED)
        if dispatch.descriptor.mode is GraphMode.NONE:
            if self._guard is not None and self._guard.knows_nothing:
                self._guard.snapshot()
            self.count_step(dispatch)
            return Outputs(self.plan.run_steps(self._views(descriptor), _eager), self.generation, None)
        program = self._programs.get(descriptor) or self._capture_now(descriptor)
        self.count_step(dispatch)
        self.generation += 1
        with torch.no_grad():
            program.replay()
        self.counters.add(Count.REPLAYS)
        return Outputs(program.outputs, self.generation, self._current_generation)

    def count_step(self, dispatch: Dispatch) -> None:
        """Count a step under `step.<mode>.<reason>`; for callers that run a step without the manager."""
        self.counters.add(dispatch.counter)

    def can_replay(self, descriptor: Descriptor) -> bool:
        """Whether `run` would replay without capturing first."""
        return descriptor in self._programs

    @property
    def num_captured(self) -> int:
        return len(self._programs)

    @property
    def captured(self) -> tuple[Descriptor, ...]:
        return capture_order(self._programs)

    @property
    def pool_bytes(self) -> int:
        return self._pool.bytes() if self._pool is not None else 0

    @property
    def trimmed(self) -> Set[Descriptor]:
        """Descriptors without a graph because of the budget; they stand in `failed` too. A Dispatcher may share this set."""
        return self._account.trimmed

    @property
    def budget_bytes(self) -> int | None:
        return None if self._account.budget is None else self._account.budget.limit_bytes

    @property
    def memory_model(self) -> MemoryModel | None:
        """What the captures so far tell about others, also after `release`."""
        return self._account.model

    def forget_model(self) -> None:
        """Let the next `capture` take its predictions from its own captures."""
        self._account.model = None

    def memory(self) -> MemoryReport:
        """Measured and predicted bytes by descriptor."""
        buffer_bytes = sum(buffer.nbytes for buffer in self._buffers())
        return self._account.report(self.pool_bytes, buffer_bytes, self.backend.why_no_nodes())

    def program(self, descriptor: Descriptor) -> ReplayProgram:
        """The captured program, for inspection. Raises `KeyError` when there is none."""
        return self._programs[descriptor]

    # --- life ---

    def weights_changed(self) -> None:
        """Look at everything that graphs read, now, and follow the address policy; "recapture" captures all graphs again before it returns.
        Values written in place are fine."""
        with self._lock:
            held = self.captured
            if self.follow_addresses() and not self.without_graphs:
                self.capture(held, self._prepare, model=self._account.model)

    def follow_addresses(self) -> bool:
        """Like `weights_changed`, but "recapture" leaves each graph to its next step. True when something had moved."""
        with self._lock:
            moved = self._guard.moved() if self._guard is not None else []
            self._follow(moved)
            return bool(moved)

    def poison(self, generator: torch.Generator | None = None) -> None:
        """Fill all static buffers and all memory of the pool with what must not matter. For tests: call it before writing inputs."""
        with self._lock:
            self.generation += 1
            for buffer in self._buffers():
                buffer.poison(generator)
            if self._pool is not None:
                self._pool.poison()

    def release(self) -> None:
        """Free all graphs and the pool; the manager can capture again afterwards."""
        with self._lock:
            self.generation += 1
            for program in self._programs.values():
                program.release()
            self._programs.clear()
            self._pending = None
            self._pool = None
            self.without_graphs = False
            self.failed.difference_update(self._account.trimmed)
            self._account.forget()
            if self._guard is not None:
                self._guard.forget()

    # --- inside ---

    def _follow(self, moved: Sequence[str], *, after: Descriptor | None = None) -> None:
        """Follow the address policy: raises, or makes the plan read what lies there now and frees the graphs that do not. `after`: a step
        of that descriptor has run already."""
        if not moved:
            return
        assert self._guard is not None
        addresses = self._guard.addresses
        self._guard.refuse(moved, repeatable=after is None or addresses.is_repeatable(after))
        self.counters.add(Count.ADDRESS_CHANGES)
        if addresses.rebind is not None:
            addresses.rebind()
        descriptors, prepare, pending = self.captured, self._prepare, self._pending
        self.backend.synchronize()  # the stale replay may still be running
        self.release()
        self._guard.snapshot()
        self.without_graphs = addresses.on_change == "none"
        if not self.without_graphs:
            waiting = pending.descriptors if pending is not None else ()
            self._pending = _Pending(prepare, self._account.model, {*descriptors, *waiting})

    def _capture_now(self, descriptor: Descriptor) -> ReplayProgram:
        """Capture a lazily planned descriptor. The step's inputs lie in the buffers already and are put back afterwards."""
        if self._pending is None or descriptor not in self._pending.descriptors or descriptor in self.failed:
            raise CaptureError(
                f"no graph was captured for ({descriptor})",
                hint="dispatch among the descriptors that were captured, and respect `manager.failed`",
                size=descriptor.num_tokens,
            )
        saved = [buffer.view(buffer.capacity).clone() for buffer in self._buffers()]
        try:
            self.capture([descriptor], self._pending.prepare, model=self._pending.model)
        finally:
            self._pending.descriptors.discard(descriptor)
            for buffer, values in zip(self._buffers(), saved, strict=True):
                buffer.view(buffer.capacity).copy_(values)
        if descriptor in self.trimmed:
            raise CaptureError(
                f"the graph of ({descriptor}) does not fit the memory budget",
                hint="raise the budget, or dispatch again: `manager.failed` holds the descriptor now",
                size=descriptor.num_tokens,
            )
        return self._programs[descriptor]

    def _views(self, descriptor: Descriptor) -> list[Any]:
        sizes = descriptor.sizes(self.dim)
        return [value.view(sizes) if isinstance(value, StaticBuffer) else value for value in self.inputs]

    def _buffers(self) -> list[StaticBuffer]:
        return [value for value in self.inputs if isinstance(value, StaticBuffer)]

    def _current_generation(self) -> int:
        return self.generation


def _eager(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
    return step.call(arguments)
