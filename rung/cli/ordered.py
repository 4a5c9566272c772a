"""A bound plan that takes its inputs in the order of the function's parameters; the trace numbers them by first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rung.compile.bound import BoundPlan, BoundStep, StepRunner
from rung.compile.compiled import CompiledFunction


class OrderedPlan(BoundPlan):
    """`names` are all inputs of `plan`, in the wanted order."""

    def __init__(self, plan: CompiledFunction, names: Sequence[str]) -> None:
        self._plan = plan
        self._order = [list(names).index(name) for name in plan.input_names]  # traced position -> position in `names`

    @property
    def steps(self) -> Sequence[BoundStep]:
        return self._plan.steps

    def __call__(self, *inputs: Any) -> Any:
        return self._plan(*self._traced(inputs))

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner) -> list[Any]:
        return self._plan.run_steps(self._traced(inputs), runner)

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return self._plan.restore(flat, self._traced(inputs))

    def _traced(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[position] for position in self._order]
