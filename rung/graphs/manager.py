"""Owns the graphs of one plan: captures them, replays them, counts why each step ran as it did."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch

from rung.compile.bound import BoundPlan, BoundStep
from rung.counters import Count, Counters
from rung.errors import CaptureError, StateError
from rung.graphs.backends.base import GraphBackend, GraphPool
from rung.graphs.buffers import StaticBuffer
from rung.graphs.capture import capture_program, warm_up
from rung.graphs.capture_report import CaptureEntry, CaptureReport
from rung.graphs.descriptor import Descriptor, GraphMode
from rung.graphs.dispatch import Dispatch, capture_order
from rung.graphs.guard import Addresses, AddressGuard
from rung.graphs.outputs import Outputs
from rung.graphs.process import HomeProcess
from rung.graphs.program import ReplayProgram
from rung.graphs.ranges import Ranges
from rung.graphs.reasons import Reason
from rung.graphs.wanted import Prepare, Wanted, nothing_to_prepare


class GraphManager:
    """The graphs of one plan over one set of static inputs, in one pool.

    `inputs` are the plan's inputs in order: static buffers, or values that never change. The caller writes into the buffers and then calls
    `run`. `prepare(descriptor)` is entered around each warm-up and each capture: it sets the forward context with harmless metadata for
    that size and must leave what it changes as it was. `plan_of` names the plan of a descriptor that runs another one over the same
    inputs. `addresses` says what graphs read besides their inputs, and what happens when that moves: it is looked at behind each replay,
    before outputs are handed out.

    Outputs belong to the manager until its next step. One lock serialises everything; a replay goes to the caller's current stream and
    waits there for the step before it. `suspend` frees graphs and their memory and remembers what they were; `resume` captures it again."""

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
        ranges: Ranges | None = None,
    ) -> None:
        self.plan = plan
        self._plan_of = plan_of or (lambda descriptor: plan)
        self.backend = backend
        self.inputs = tuple(inputs)
        self.dim = dim
        self.counters = counters if counters is not None else Counters()
        self.failed: set[Descriptor] = set()  # descriptors whose capture failed; a Dispatcher may share this set
        self.generation = 0  # steps run so far; outputs of an older one are stale
        self.generators = tuple(generators)
        self._guard = AddressGuard(addresses, self.inputs) if addresses is not None else None
        self._home = HomeProcess()
        self.without_graphs = False  # addresses changed under the policy "none": steps run the plan until graphs are captured again
        self._pool: GraphPool | None = None
        self._programs: dict[Descriptor, ReplayProgram] = {}
        self._wanted = Wanted()
        self._order = backend.new_order()
        self._ranges = ranges
        self._lock = threading.RLock()

    # --- capture ---

    def capture(
        self,
        descriptors: Iterable[Descriptor],
        prepare: Prepare = nothing_to_prepare,
        *,
        order: Literal["largest_first", "given"] = "largest_first",
        lazy: bool = False,
        on_failure: Literal["raise", "skip"] = "raise",
    ) -> CaptureReport:
        """Capture each descriptor that has no graph yet. `lazy` puts it off to the first `run` of each.

        A failure does not end the ladder: the rest is captured, then the first `CaptureError` is raised, or all are returned in the report
        when `on_failure` is "skip". Either way the descriptors that failed stand in `failed`."""
        with self._lock:
            wanted = [d for d in descriptors if d.mode is not GraphMode.NONE and d not in self._programs]
            if self.is_suspended and not lazy:
                raise StateError("a capture was asked for while the graphs are suspended", hint="call resume() first")
            self._wanted.add(wanted, prepare, lazy=lazy)
            if lazy:
                return CaptureReport((), (), 0.0, self.pool_bytes)
            return self._capture_all(capture_order(wanted) if order == "largest_first" else wanted, on_failure)

    def _capture_all(self, descriptors: Sequence[Descriptor], on_failure: str = "raise") -> CaptureReport:
        started = time.perf_counter()
        self._home.enter()
        self.follow_addresses()
        self.without_graphs = False
        entries: list[CaptureEntry] = []
        failures: list[CaptureError] = []
        self.generation += 1  # captures overwrite what replays left in the pool
        if self._pool is None:
            self._pool = self.backend.new_pool()
        held = self._pool.bytes()
        with self._order.step(), self.backend.session(), torch.inference_mode(False), torch.no_grad():
            for descriptor in descriptors:
                try:
                    entries.append(self._capture_one(descriptor, self._pool, held))
                    held += entries[-1].pool_bytes
                except CaptureError as error:
                    self.failed.add(descriptor)
                    failures.append(error)
        self.backend.synchronize()
        report = CaptureReport(tuple(entries), tuple(failures), time.perf_counter() - started, self.pool_bytes)
        if failures and on_failure == "raise":
            if len(failures) > 1:
                failures[0].add_note(f"{len(failures) - 1} more captures failed, sizes {[error.size for error in failures[1:]]}")
            raise failures[0]
        return report

    def _capture_one(self, descriptor: Descriptor, pool: GraphPool, bytes_before: int) -> CaptureEntry:
        started = time.perf_counter()
        inputs = self.views(descriptor)
        with self._wanted.prepare(descriptor):
            warm_up(self._plan_of(descriptor), self.backend.device, descriptor, inputs, self.generators)
        if self._guard is not None and self._guard.knows_nothing:
            self._guard.snapshot()
        with self._wanted.prepare(descriptor):
            program = capture_program(self._plan_of(descriptor), self.backend, pool, descriptor, inputs, self.generators)
        if self._ranges is not None:
            self._ranges.mark(program, descriptor)
        self._programs[descriptor] = program
        self._wanted.captured(descriptor)
        self.failed.discard(descriptor)
        self.counters.add(Count.CAPTURES)
        return CaptureEntry(descriptor, time.perf_counter() - started, pool.bytes() - bytes_before, program.launches)

    # --- run ---

    def run(self, step: Dispatch | Descriptor) -> Outputs:
        """Run one step over what the buffers hold: replay the descriptor's graphs, or the plan itself at exact sizes for mode NONE.

        Raises `CaptureError` when the descriptor was neither captured nor planned lazily, `StateError` when the graphs are suspended,
        `AddressChangedError` when what graphs read moved and the policy is to raise, or when the step cannot be repeated."""
        self._home.check()
        dispatch = step if isinstance(step, Dispatch) else Dispatch(step)
        with self._lock, self._order.step():
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
            runner = _eager if self._ranges is None else self._ranges.step
            return Outputs(self.plan.run_steps(self.views(descriptor), runner), self.generation, None)
        program = self._programs.get(descriptor) or self._capture_now(descriptor)
        self.count_step(dispatch)
        self.generation += 1
        with torch.no_grad():
            program.replay()
        self.counters.add(Count.REPLAYS)
        return Outputs(program.outputs, self.generation, self._current_generation)

    def step(self) -> AbstractContextManager[Any]:
        """Enter it around a step's writes into the buffers, its `run` and the reading of its outputs when steps may come from several
        streams or devices: the writes then wait for the step before. `run` enters it too. The caller holds a lock of its own around it."""
        return self._order.step()

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
                self._capture_all(held)

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

    @property
    def is_suspended(self) -> bool:
        return self._wanted.is_suspended

    def suspend(self) -> None:
        """Free all graphs and their memory; static buffers, the plan and the list of what was captured stay. Twice is once."""
        with self._lock:
            self._wanted.put_away(self.captured)
            self._free()
            self.backend.give_back()

    def resume(self) -> CaptureReport:
        """Capture again what `suspend` freed; without it nothing is done. A failure is raised and leaves the rest captured."""
        with self._lock:
            return self._capture_all(self._wanted.take_back())

    def recapture(self) -> CaptureReport:
        """Free the graphs, make the plan read what lies there now, and capture the same list again."""
        with self._lock:
            self.suspend()
            if self._guard is not None and self._guard.addresses.rebind is not None:
                self._guard.addresses.rebind()
            return self.resume()

    def release(self) -> None:
        """Free all graphs and the pool, and forget what was captured; the manager can capture again afterwards."""
        with self._lock:
            self._free()
            self._wanted.forget()
            self.without_graphs = False

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
        captured = self.captured
        self._free()
        self._guard.snapshot()
        self.without_graphs = addresses.on_change == "none"
        if not self.without_graphs:
            self._wanted.at_next_step(captured)

    def _free(self) -> None:
        self.generation += 1
        if self._programs:
            self.backend.synchronize()  # a graph may still be running, and its memory is about to be somebody else's
        for program in self._programs.values():
            program.release()
        self._programs.clear()
        self._pool = None
        if self._guard is not None:
            self._guard.forget()

    def _capture_now(self, descriptor: Descriptor) -> ReplayProgram:
        """Capture a lazily planned descriptor. The step's inputs lie in the buffers already and are put back afterwards."""
        self._wanted.check_lazy(descriptor)
        saved = [buffer.view(buffer.capacity).clone() for buffer in self._buffers()]
        try:
            self._capture_all([descriptor])
        finally:
            self._wanted.captured(descriptor)
            for buffer, values in zip(self._buffers(), saved, strict=True):
                buffer.view(buffer.capacity).copy_(values)
        return self._programs[descriptor]

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


def _eager(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
    return step.call(arguments)
