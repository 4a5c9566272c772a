"""Named ranges around pieces, breaks and replays, for profilers. Without them nothing is wrapped, so they cost nothing when off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rung.compile.bound import BoundStep
from rung.errors import ConfigError
from rung.graphs.descriptor import Descriptor
from rung.graphs.program import ReplayProgram


class Ranges:
    """Pushes and pops nested ranges: NVTX by default, or what is given."""

    def __init__(self, push: Callable[[str], Any] | None = None, pop: Callable[[], Any] | None = None) -> None:
        self._push: Callable[[str], Any] = push or torch.cuda.nvtx.range_push
        self._pop: Callable[[], Any] = pop or torch.cuda.nvtx.range_pop

    def around(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        """`run` inside a range."""

        def ranged() -> None:
            self._push(name)
            try:
                run()
            finally:
                self._pop()

        return ranged

    def step(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        """A step of a plan that runs without a graph; a `StepRunner`."""
        self._push(step.name)
        try:
            return step.call(arguments)
        finally:
            self._pop()

    def mark(self, program: ReplayProgram, descriptor: Descriptor) -> None:
        """Let each replay of `program` show a range for itself and one for each action."""
        names = [f"{action.kind} {action.name}" for action in program.actions]
        program.wrap(lambda runs: [self.around(name, run) for name, run in zip(names, runs, strict=True)])
        program.wrap(lambda runs: [self.around(f"replay ({descriptor})", _in_order(runs))])


def nvtx_ranges(wanted: bool) -> Ranges | None:
    """NVTX ranges when they are wanted. Raises `ConfigError` when this torch has none."""
    if not wanted:
        return None
    try:
        torch.cuda.nvtx.range_push("rung")
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        raise ConfigError(f"nvtx=True, but this torch has no NVTX: {error}", hint="use a CUDA build of torch, or leave nvtx out") from None
    return Ranges()


def _in_order(runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for one in runs:
            one()

    return run
