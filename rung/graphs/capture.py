"""Capturing one descriptor of a plan into a replay program."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch

from rung.compile.bound import BoundPlan, BoundStep
from rung.errors import CaptureError
from rung.graphs.backends.base import GraphBackend, GraphPool
from rung.graphs.descriptor import Descriptor, GraphMode
from rung.graphs.program import GraphLaunch, PreboundBreak, ReplayProgram


class _Capture:
    """One walk over the plan's steps. `step` is the one that runs, for error messages."""

    def __init__(self, backend: GraphBackend, pool: GraphPool, generators: Sequence[torch.Generator], inputs: Sequence[Any]) -> None:
        self._outside = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)}  # asking the pool costs
        self._backend = backend
        self._pool = pool
        self._generators = generators
        self.actions: list[GraphLaunch | PreboundBreak] = []
        self.step = ""

    def piecewise(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        """A graph around each piece; a break runs now and is bound to what it was given."""
        self.step = step.name
        if step.kind == "piece":
            with self._backend.capture(self._pool, self._generators) as graph:
                outputs = self._backend.call_piece(step, arguments)
            self.actions.append(GraphLaunch(step.name, graph))
            self._backend.settle(graph)
            return outputs
        given = list(arguments)
        outputs = step.call(arguments)
        self.actions.append(PreboundBreak(step, self.aliases(given), self.aliases(outputs)))
        return outputs

    def full(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        """Inside the one graph of the whole plan."""
        self.step = step.name
        return self._backend.call_piece(step, arguments) if step.kind == "piece" else step.call(arguments)

    def run(self, plan: BoundPlan, inputs: Sequence[Any], mode: GraphMode) -> list[Any]:
        if mode is GraphMode.PIECEWISE:
            return self.aliases(plan.run_steps(inputs, self.piecewise))
        with self._backend.capture(self._pool, self._generators) as graph:
            flat = plan.run_steps(inputs, self.full)
        self.actions.append(GraphLaunch("full", graph))
        self._backend.upload(graph)
        return self.aliases(flat)

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


def warm_up(plan: BoundPlan, descriptor: Descriptor, inputs: Sequence[Any]) -> None:
    """Run the plan once at the size of `descriptor`, so that kernels are loaded and tuned and workspaces exist before a capture."""
    walk = _Walk()
    try:
        plan.run_steps(inputs, walk.eager)
    except Exception as error:
        raise _capture_error(descriptor, walk.step, error, "warm-up") from error


def capture_program(
    plan: BoundPlan,
    backend: GraphBackend,
    pool: GraphPool,
    descriptor: Descriptor,
    inputs: Sequence[Any],
    generators: Sequence[torch.Generator] = (),
) -> ReplayProgram:
    """Capture `plan` at the size of `descriptor`. `inputs` are views of static buffers, which the program keeps alive.

    Raises `CaptureError` with size, step and cause; what was captured for this descriptor until then is released."""
    capture = _Capture(backend, pool, generators, inputs)
    try:
        outputs = capture.run(plan, inputs, descriptor.mode)
    except Exception as error:
        capture.release()
        raise _capture_error(descriptor, capture.step, error, "capture") from error
    return ReplayProgram(descriptor, capture.actions, outputs, [*inputs, plan, pool])


class _Walk:
    """An eager run that knows which step it is in."""

    def __init__(self) -> None:
        self.step = ""

    def eager(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        self.step = step.name
        return step.call(arguments)


def _capture_error(descriptor: Descriptor, step: str, cause: Exception, during: str) -> CaptureError:
    if cause.__traceback__ is not None:
        traceback.clear_frames(cause.__traceback__)  # their locals would keep device memory for as long as the error lives
    hint = cause.hint if isinstance(cause, CaptureError) else ""
    first_line = (str(cause).splitlines() or [""])[0]
    return CaptureError(
        f"{during} of ({descriptor}) failed in {step or 'the plan'}: {type(cause).__name__}: {first_line}",
        hint=hint
        or "a capture must not wait for the device, read its values on the host, or allocate outside of torch; "
        "mark such code with an eager break, or run this size without a graph",
        size=descriptor.num_tokens,
        piece=step,
    )
