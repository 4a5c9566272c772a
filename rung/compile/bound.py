"""A compile plan bound to one module: the steps that graphs capture and that the stitched function runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

import torch

from rung.attention import AttentionCall

StepCall = Callable[[list[Any]], Sequence[Any]]  # takes the inputs as one list, returns the outputs as a sequence


class Capture(StrEnum):
    """Where a step may run inside a graph. What it reads besides its tensors decides: that must lie at fixed addresses as well."""

    ALWAYS = "always"  # in every mode, joined with its neighbours: nothing, or what lies at fixed addresses in every step of one size
    FULL = "full"  # where the whole step is captured: lengths then lie on the device, under bounds that hold for all its batches
    NEVER = "never"  # it decides on the host


@dataclass(frozen=True, slots=True)
class BoundStep:
    """A compiled piece, or a break: code that runs between captured pieces (attention, `eager_break`).

    `call` takes ONE list of inputs (tensors, ints) and returns a sequence of outputs. A piece may clear the list it is given; a break
    must not keep it. A break mutates its out-arguments in place and may also return fresh tensors."""

    kind: Literal["piece", "break"]
    name: str  # unique in the plan, e.g. "piece_03", "attention_02"
    call: StepCall
    capture: Capture = Capture.FULL  # of a break; a piece is captured always
    attention: Callable[[Sequence[Any]], AttentionCall] | None = None  # of a break that attends: see `attention_of`, from its inputs

    def capturable(self, full: bool) -> bool:
        """Whether the step belongs inside a graph, in a FULL descriptor or in a PIECEWISE one."""
        return self.kind == "piece" or self.capture is Capture.ALWAYS or (full and self.capture is Capture.FULL)


StepRunner = Callable[[BoundStep, list[Any]], Sequence[Any]]


def call_step(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
    """The `StepRunner` that only runs."""
    return step.call(arguments)


def profiled_step(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
    """The `StepRunner` that shows each step by name in torch.profiler."""
    with torch.profiler.record_function(f"rung {step.kind} {step.name}"):
        return step.call(arguments)


def gpu_or_first(devices: Sequence[torch.device]) -> torch.device:
    """The first GPU among the devices of a function's tensors, for which it is compiled; without one the first device."""
    return next((device for device in devices if device.type == "cuda"), devices[0] if devices else torch.device("cpu"))


class BoundPlan(Protocol):
    """What graphs need from compile. Parameters are bound inside; `inputs` are the user's tensors in the traced order."""

    @property
    def steps(self) -> Sequence[BoundStep]: ...

    def __call__(self, *inputs: Any) -> Any:
        """Run everything now; returns the user's output structure."""
        ...

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner) -> list[Any]:
        """Walk the steps in order, calling `runner(step, arguments)` for each, dropping every value after its last use; returns the flat
        outputs (tensors and ints) of the graph."""
        ...

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Rebuild the user's output structure from flat outputs (and the inputs, for outputs that are inputs)."""
        ...


def call_steps(plan: BoundPlan, *inputs: Any) -> Any:
    """Run a plan step by step, as graphs see it; returns the user's output structure."""
    return plan.restore(plan.run_steps(inputs, call_step), inputs)
