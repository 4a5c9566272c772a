"""Capturing one descriptor of a plan into a replay program."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from rung import torch_compat
from rung.compile.bound import BoundPlan, BoundStep, Capture, StepCall
from rung.errors import CaptureError
from rung.graphs.backends.base import GraphBackend, GraphPool, NodeCounts
from rung.graphs.descriptor import Descriptor, GraphMode
from rung.graphs.dry_run import DryRun
from rung.graphs.program import GraphLaunch, PieceLaunches, PieceReason, PreboundBreak, ReplayProgram
from rung.graphs.repeats import BreakRepeats
from rung.launch import LaunchRecord, Workspace, record_launches

# A graph between two breaks is replayed as launches where its pieces are given so many bytes for each of them, nearly all of them weights:
# reading them takes longer (5 us at 4.2 TB/s) than the host needs for a launch, 2.5 to 4 us.
LAUNCHED_BYTES = 20 << 20


class _Capture:
    """One walk over the plan's steps: graphs of as many steps as can be captured together, and the breaks between them.

    `step` is the one that runs, for error messages."""

    def __init__(
        self,
        backend: GraphBackend,
        pool: GraphPool,
        generators: Sequence[torch.Generator],
        inputs: Sequence[Any],
        *,
        full: bool,
        watch: bool,
    ) -> None:
        self._outside = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)}  # asking the pool costs
        self._backend = backend
        self._pool = pool
        self._generators = generators
        self._check = DryRun(backend.device, generators, stop=True) if watch else None
        self._full = full
        self._recorded = backend.repeats_launches() and not full
        self._open: ExitStack | None = None
        self._record: LaunchRecord | None = None
        self._bytes = 0  # of what the pieces of the open graph were given
        self.actions: list[GraphLaunch | PreboundBreak] = []
        self.step = ""

    def take(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        """Add one step: to the graph that is open, to a new one, or as a break between two, bound to what it was given."""
        self.step = step.name
        if step.kind == "break" and step.capture is Capture.ALWAYS and not any(isinstance(value, torch.Tensor) for value in arguments):
            return step.call(arguments)  # numbers, the same in every step of one size
        if step.capturable(self._full):
            if self._open is None:
                self._begin(step.name)
            if step.kind == "piece":
                if self._record is not None:
                    self._bytes += sum(value.numel() * value.element_size() for value in arguments if isinstance(value, torch.Tensor))
                return self._backend.call_piece(step, arguments)
            with nullcontext() if self._check is None else self._check.watch():
                return step.call(arguments)
        self._end(settle=True)
        self.step = step.name
        given = list(arguments)
        outputs = step.call(arguments)
        self.actions.append(PreboundBreak(step, self.aliases(given), self.aliases(outputs)))
        return outputs

    def run(self, plan: BoundPlan, inputs: Sequence[Any]) -> list[Any]:
        try:
            flat = plan.run_steps(inputs, self.take)
            self._end(settle=not self._full)
        except BaseException as error:
            if self._open is not None:
                self._open.__exit__(type(error), error, error.__traceback__)
            raise
        return self.aliases(flat)

    def _begin(self, name: str) -> None:
        """Open the graph of the steps from here to the next one that must run on the host."""
        opened = ExitStack()
        self._graph, self._name = opened.enter_context(self._backend.capture(self._pool, self._generators)), name
        self._record = opened.enter_context(record_launches(Workspace())) if self._recorded else None
        self._bytes = 0
        self._open = opened  # only what was entered is left

    def _end(self, *, settle: bool) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.__exit__(None, None, None)
        self.actions.append(self._launch())
        if settle:
            self._backend.settle(self._graph)
        else:
            self._backend.upload(self._graph)

    def _launch(self) -> GraphLaunch:
        """The graph that was captured, or its launches where these are all that it holds, and few for the work."""
        record, reason = self._record, None
        if record is None:
            return GraphLaunch(self._name, self._graph)
        if record.why_not is not None or record.memory.nbytes:
            reason = PieceReason.UNREPEATABLE
        elif not len(record) or self._graph.nodes != NodeCounts(kernels=len(record)):
            reason = PieceReason.OTHER_NODES
        elif self._bytes < LAUNCHED_BYTES * len(record):
            reason = PieceReason.FEW_BYTES
        else:
            return PieceLaunches(self._name, self._graph, record.repeat())
        return GraphLaunch(self._name, self._graph, reason)

    def aliases(self, values: Sequence[Any]) -> list[Any]:
        """What a program may keep of values: memory of the pool without owning it, everything else strongly."""
        return [self._alias(value) if isinstance(value, torch.Tensor) else value for value in values]

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() in self._outside:
            return tensor
        alias = self._pool.alias(tensor)
        if alias is tensor:
            self._outside.add(tensor.untyped_storage().data_ptr())  # held by the program from here on, so the address stays its own
        return alias

    def release(self) -> None:
        for action in self.actions:
            if isinstance(action, GraphLaunch):
                action.graph.release()
        self.actions.clear()


def has_host_breaks(plan: BoundPlan) -> bool:
    """Whether a FULL capture of the plan is cut by breaks that decide on the host."""
    return any(step.kind == "break" and step.capture is Capture.NEVER for step in plan.steps)


def warm_up(
    plan: BoundPlan,
    device: torch.device,
    descriptor: Descriptor,
    inputs: Sequence[Any],
    generators: Sequence[torch.Generator] = (),
    *,
    watch: bool = True,
) -> None:
    """Run the plan once at the size of `descriptor`, so that kernels are loaded and tuned and workspaces exist before a capture. With
    `watch` this is also the dry run of the breaks that the capture will contain; without it code that several pieces share runs once, and
    its first results stand for those of the others. Raises `CaptureError`."""
    walk = _Walk(DryRun(device, generators) if watch else None, full=descriptor.mode is GraphMode.FULL)
    try:
        plan.run_steps(inputs, walk.eager if watch else walk.each_code)
        walk.finish()
    except Exception as error:
        raise _capture_error(descriptor, walk.step, error, "warm-up") from error


def capture_program(
    plan: BoundPlan,
    backend: GraphBackend,
    pool: GraphPool,
    descriptor: Descriptor,
    inputs: Sequence[Any],
    generators: Sequence[torch.Generator] = (),
    *,
    watch: bool = True,
    repeats: BreakRepeats | None = None,
) -> ReplayProgram:
    """Capture `plan` at the size of `descriptor`. `inputs` are views of static buffers, which the program keeps alive. With `watch`
    breaks are stopped at the first operation that must not be captured. Without `repeats` breaks run their Python in every replay.

    Raises `CaptureError` with size, step and cause; what was captured for this descriptor until then is released."""
    capture = _Capture(backend, pool, generators, inputs, full=descriptor.mode is GraphMode.FULL, watch=watch)
    try:
        outputs = capture.run(plan, inputs)
    except Exception as error:
        capture.release()
        raise _capture_error(descriptor, capture.step, error, "capture") from error
    return ReplayProgram(descriptor, capture.actions, outputs, [*inputs, plan, pool], repeats)


class _Walk:
    """An eager run that knows which step it is in."""

    def __init__(self, check: DryRun | None, *, full: bool) -> None:
        self.step = ""
        self._check = check
        self._full = full
        self._bad = ""  # the first break in which something was found
        self._made: dict[StepCall, Sequence[Any]] = {}  # results of the first piece of each code

    def eager(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        self.step = step.name
        if self._check is None or step.kind == "piece" or not step.capturable(self._full):
            return step.call(arguments)
        with self._check.watch():
            outputs = step.call(arguments)
        if self._check.findings and not self._bad:
            self._bad = step.name
        return outputs

    def each_code(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        """An eager run of each break, and of the first piece of each code. What a break has updated in place no later piece makes, so
        behind it each code runs anew; not so behind attention and what writes its cache, which fill memory that nobody has written."""
        if step.kind != "piece":
            given = [(value, torch_compat.num_updates(value)) for value in arguments if isinstance(value, torch.Tensor)]
            outputs = self.eager(step, arguments)
            fills = step.attention is not None or step.capture is Capture.ALWAYS
            if not fills and any(torch_compat.num_updates(value) != before for value, before in given):
                self._made.clear()
            return outputs
        if step.call not in self._made:
            self._made[step.call] = tuple(self.eager(step, arguments))
        return self._made[step.call]

    def finish(self) -> None:
        self.step = self._bad or self.step
        if self._check is not None:
            self._check.refuse()


def _capture_error(descriptor: Descriptor, step: str, cause: Exception, during: str) -> CaptureError:
    if cause.__traceback__ is not None:
        traceback.clear_frames(cause.__traceback__)  # their locals would keep device memory for as long as the error lives
    hint = cause.hint if isinstance(cause, CaptureError) else ""
    first_line = (str(cause).splitlines() or [""])[0]
    kind = type(cause) if isinstance(cause, CaptureError) else CaptureError
    error = kind(
        f"{during} of ({descriptor}) failed in {step or 'the plan'}: {type(cause).__name__}: {first_line}",
        hint=hint
        or "a capture must not wait for the device, read its values on the host, or allocate outside of torch; "
        "mark such code with an eager break, or run this size without a graph",
        size=descriptor.num_tokens,
        piece=step,
    )
    for note in getattr(cause, "__notes__", ()):
        error.add_note(note)
    return error
