"""Owns the graphs of one plan: captures them, replays them, counts why each step ran as it did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch

from rung import torch_compat
from rung.compile.bound import BoundPlan, call_step, profiled_step
from rung.counters import Count, Counters
from rung.errors import StateError
from rung.graphs.backends.base import GraphBackend
from rung.graphs.buffers import StaticBuffer, kept
from rung.graphs.capture_report import CaptureReport
from rung.graphs.capturing import Capturing, Order
from rung.graphs.descriptor import Descriptor, GraphMode
from rung.graphs.dispatch import Dispatch
from rung.graphs.follower import AddressFollower
from rung.graphs.guard import Addresses, AddressGuard
from rung.graphs.memory import MemoryModel, MemoryReport
from rung.graphs.memory_budget import MemoryBudget
from rung.graphs.outputs import Outputs
from rung.graphs.planned import capture_order
from rung.graphs.process import HomeProcess
from rung.graphs.program import ReplayProgram
from rung.graphs.ranges import Ranges
from rung.graphs.reasons import Reason
from rung.graphs.wanted import Prepare, nothing_to_prepare


class GraphManager:
    """The graphs of one plan over one set of static inputs, in one pool.

    `inputs` are the plan's inputs in order: static buffers, or values that never change. The caller writes into the buffers and then calls
    `run`. `prepare(descriptor)` is entered around the warm-up and the capture of a size: it sets the forward context with harmless metadata
    for that size and must leave what it changes as it was. `plan_of` names the plan of a descriptor that runs another one over the same
    inputs. `addresses` says what graphs read besides their inputs, and what happens when that moves: it is looked at behind each replay,
    before outputs are handed out. With a `budget`, descriptors whose graphs would not fit are trimmed. `watch_all` False looks at
    the first capture of each kind alone for what must not be captured.

    Outputs belong to the manager until its next step. One lock serialises everything; a replay goes to the caller's current stream and
    waits there for the step before it. `suspend` frees graphs and their memory and remembers what they were; `resume` captures it again.

    A break that runs another step of the manager, or changes its graphs, would overwrite the step that it is part of: it gets a
    `StateError`, and `is_running` says so beforehand."""

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
        ranges: Ranges | None = None,
        watch_all: bool = True,
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.inputs = tuple(inputs)
        self.dim = dim
        self.counters = counters if counters is not None else Counters()
        self.generation = 0  # steps run so far; outputs of an older one are stale
        self.is_running = False  # inside of a step or a capture; whoever holds the lock and sees it was called by a break
        self._guard = AddressGuard(addresses, self.inputs) if addresses is not None else None
        self._home = HomeProcess()
        self._order = backend.new_order()
        self._ranges = ranges
        self._lock = threading.RLock()
        self._captures = Capturing(
            backend,
            plan_of or (lambda descriptor: plan),
            self.views,
            lambda: self._follower.know(),
            generators=generators,
            counters=self.counters,
            budget=budget,
            ranges=ranges,
            watch_all=watch_all,
        )
        self._follower = AddressFollower(self._guard, self._captures, self.counters, self._free)
        self._programs = self._captures.programs
        self._wanted = self._captures.wanted
        self.budget_bytes = None if budget is None else budget.limit_bytes
        self.generators = self._captures.generators
        self.trimmed: Set[Descriptor] = self._captures.account.trimmed  # without a graph because of the budget, and in `failed` too
        self.failed = self._captures.failed  # descriptors that will have no graph: failed or trimmed; a Dispatcher may share both sets

    # --- capture ---

    def capture(
        self,
        descriptors: Iterable[Descriptor],
        prepare: Prepare = nothing_to_prepare,
        *,
        order: Order = "largest_first",
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
            self.refuse_nested()
            if self.is_suspended and not lazy:
                raise StateError("a capture was asked for while the graphs are suspended", hint="call resume() first")
            wanted = [d for d in descriptors if d.mode is not GraphMode.NONE]
            self._wanted.add([d for d in wanted if d not in self._programs], prepare, lazy=lazy)
            if lazy:
                self._captures.plan([d for d in wanted if d not in self._programs], model)
                return CaptureReport((), (), 0.0, self.pool_bytes)
            return self._capture(wanted, order=order, on_failure=on_failure, model=model)

    def _capture(
        self,
        descriptors: Sequence[Descriptor],
        *,
        order: Order = "largest_first",
        on_failure: str = "raise",
        model: MemoryModel | None = None,
    ) -> CaptureReport:
        self._home.enter()
        self._follower.follow_all()
        self._follower.without_graphs = False
        self.generation += 1  # captures overwrite what replays left in the pool
        missing = [d for d in descriptors if d not in self._programs]  # asked after `follow_all`, which may free some
        outer, self.is_running = self.is_running, True  # a lazy capture is part of a step
        try:
            with self._order.step():
                report = self._captures.capture(missing, order=order, on_failure=on_failure, model=model)
        finally:
            self.is_running = outer
        return replace(report, memory=self.memory())

    # --- run ---

    def run(self, step: Dispatch | Descriptor) -> Outputs:
        """Run one step over what the buffers hold: replay the descriptor's graphs, or the plan itself at exact sizes for mode NONE.

        Raises `CaptureError` when the descriptor was neither captured nor planned lazily, `StateError` when the graphs are suspended,
        `AddressChangedError` when what graphs read moved and the policy is to raise, or when the step cannot be repeated."""
        self._home.check()
        dispatch = step if isinstance(step, Dispatch) else Dispatch(step)
        with self._lock, self._order.step():
            self.refuse_nested()
            self.is_running = True
            try:
                return self._run_guarded(dispatch)
            finally:
                self.is_running = False

    def _run_guarded(self, dispatch: Dispatch) -> Outputs:
        if self._guard is None:
            return self._run(dispatch)
        if self._guard.suspect or self._guard.addresses.before_replay:
            self._follower.follow(self._guard.sweep(everything=True))
        outputs = self._run(dispatch)
        moved = self._guard.sweep()
        if not moved:
            return outputs
        self._follower.follow(moved, after=dispatch.descriptor)
        return self._run(dispatch)  # the outputs of stale addresses are dropped

    def _run(self, dispatch: Dispatch) -> Outputs:
        descriptor = dispatch.descriptor
        if self._follower.without_graphs and descriptor.mode is not GraphMode.NONE:
            dispatch = replace(dispatch, descriptor=replace(descriptor, mode=GraphMode.NONE), reason=Reason.ADDRESS_CHANGED)
        if dispatch.descriptor.mode is GraphMode.NONE:
            self._follower.know()
            self.count_step(dispatch)
            plain = profiled_step if torch_compat.profiling() else call_step
            runner = plain if self._ranges is None else self._ranges.step
            return Outputs(self.plan.run_steps(self.views(descriptor), runner), self.generation, None)
        program = self._programs.get(descriptor) or self._capture_now(descriptor)
        self.generation += 1
        if torch_compat.profiling():
            with torch.profiler.record_function(f"rung replay {descriptor}"):
                program.replay()
        else:
            program.replay()  # the launch comes first, what is counted comes behind it
        self.count_step(dispatch)
        self.counters.add(Count.REPLAYS)
        return Outputs(program.outputs, self.generation, self._current_generation)

    def step(self) -> AbstractContextManager[Any]:
        """Enter it around a step's writes into the buffers, its `run` and the reading of its outputs when steps may come from several
        streams or devices: the writes then wait for the step before. `run` enters it too. The caller holds a lock of its own around it."""
        return self._order.step()

    def refuse_nested(self) -> None:
        """Raise `StateError` inside of a step or a capture of this manager; the caller holds the lock, or is the only one."""
        if self.is_running:
            raise StateError(
                "graphs were used, changed or freed by a break inside of their own step",
                hint="do it behind the step; a wrapped module may be called by its own break, and runs without graphs there",
            )

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
        return self._captures.pool_bytes

    @property
    def without_graphs(self) -> bool:
        """Addresses changed under the policy "none": steps run the plan until graphs are captured again."""
        return self._follower.without_graphs

    @property
    def memory_model(self) -> MemoryModel | None:
        """What the captures so far tell about others, also after `release`."""
        return self._captures.account.model

    def forget_model(self) -> None:
        """Let the next `capture` take its predictions from its own captures."""
        self._captures.account.model = None

    def memory(self) -> MemoryReport:
        """Measured and predicted bytes by descriptor."""
        buffer_bytes = sum(buffer.nbytes for buffer in self._buffers()) + self._captures.repeats.memory.nbytes
        return self._captures.account.report(self.pool_bytes, buffer_bytes, self.backend.why_no_nodes())

    def program(self, descriptor: Descriptor) -> ReplayProgram:
        """The captured program, for inspection. Raises `KeyError` when there is none."""
        return self._programs[descriptor]

    # --- life ---

    def weights_changed(self) -> None:
        """Look at everything that graphs read, now, and follow the address policy; "recapture" captures all graphs again before it returns.
        Values written in place are fine."""
        with self._lock:
            self.refuse_nested()
            held = self.captured
            if self.follow_addresses() and not self.without_graphs:
                self._capture(held, model=self.memory_model)

    def settle_addresses(self) -> None:
        """Follow the policy for what a sweep has seen and nobody has followed yet. A dispatcher asks before it chooses: afterwards steps
        may have to run without graphs."""
        if self._guard is not None and self._guard.suspect:
            with self._lock:
                self._follower.follow(self._guard.sweep(everything=True))

    def follow_addresses(self) -> bool:
        """Like `weights_changed`, but "recapture" leaves each graph to its next step. True when something had moved."""
        with self._lock:
            self.refuse_nested()
            return self._follower.follow_all()

    def poison(self, generator: torch.Generator | None = None) -> None:
        """Fill all static buffers and all memory of the pool with what must not matter. For tests: call it before writing inputs."""
        with self._lock:
            self.refuse_nested()
            self.generation += 1
            for buffer in self._buffers():
                buffer.poison(generator)
            if self._captures.pool is not None:
                self._captures.pool.poison()

    @property
    def is_suspended(self) -> bool:
        return self._wanted.is_suspended

    def suspend(self) -> None:
        """Free all graphs and their memory; static buffers, the plan and the list of what was captured stay. Twice is once."""
        with self._lock:
            self.refuse_nested()
            self._wanted.put_away(self.captured)
            self._free()
            self.backend.give_back()

    def resume(self) -> CaptureReport:
        """Capture again what `suspend` freed; without it nothing is done. A failure is raised and leaves the rest captured."""
        with self._lock:
            self.follow_addresses()  # may raise, and nothing is taken back then
            return self._capture(self._wanted.take_back(), model=self.memory_model)

    def recapture(self) -> CaptureReport:
        """Free the graphs, make the plan read what lies there now, and capture the same list again."""
        with self._lock:
            self.refuse_nested()
            self._follower.refuse_layouts()
            self._follower.forget()
            self.suspend()
            return self.resume()

    def release(self) -> None:
        """Free all graphs and the pool, and forget what was captured; the manager can capture again afterwards."""
        with self._lock:
            self.refuse_nested()
            self._free()
            self._follower.forget()
            self._wanted.forget()
            self._follower.without_graphs = False

    # --- inside ---

    def _free(self) -> None:
        self.generation += 1
        self._captures.free()

    def _capture_now(self, descriptor: Descriptor) -> ReplayProgram:
        """Capture a lazily planned descriptor. The step's inputs lie in the buffers already and are put back afterwards."""
        self._wanted.check_lazy(descriptor)
        with kept(self._buffers()):
            try:
                self._capture([descriptor], model=self.memory_model)
            finally:
                self._wanted.captured(descriptor)
        return self._captures.program(descriptor)

    def prepare(self, descriptor: Descriptor) -> AbstractContextManager[Any]:
        """What `capture` was given for `descriptor`, entered."""
        return self._wanted.prepare(descriptor)

    def views(self, descriptor: Descriptor) -> list[Any]:
        """The plan's inputs at the size of `descriptor`."""
        sizes = descriptor.sizes(self.dim)
        return [value.view(sizes) if isinstance(value, StaticBuffer) else value for value in self.inputs]

    def _buffers(self) -> list[StaticBuffer]:
        return [value for value in self.inputs if isinstance(value, StaticBuffer)]

    def _current_generation(self) -> int:
        return self.generation
