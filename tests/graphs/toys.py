"""Hand-written plans with every kind of step, and what is needed to run them with graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rung.compile.bound import BoundStep, StepRunner
from rung.graphs import BufferSpec, ConfiguredMode, Descriptor, GraphManager, Ladder, StaticBuffer, make_backend, plan_descriptors
from rung.graphs.backends.base import GraphBackend

WIDTH = 4


@dataclass
class ToyPlan:
    """A plan whose walk is a list of (step, names of inputs, names of outputs) over named values; a value dies after its last use."""

    walk: Sequence[tuple[BoundStep, tuple[str, ...], tuple[str, ...]]]
    results: tuple[str, ...]
    inputs: tuple[str, ...] = ("x",)

    @property
    def steps(self) -> Sequence[BoundStep]:
        return [step for step, _, _ in self.walk]

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner) -> list[Any]:
        values = dict(zip(self.inputs, inputs, strict=True))
        for position, (step, needs, makes) in enumerate(self.walk):
            arguments = [values[name] for name in needs]
            later = {name for _, names, _ in self.walk[position + 1 :] for name in names} | set(self.results)
            values = {name: value for name, value in values.items() if name in later}
            values.update(zip(makes, runner(step, arguments), strict=True))
            del arguments
        return [values[name] for name in self.results]

    def __call__(self, *inputs: Any) -> Any:
        return self.restore(self.run_steps(inputs, lambda step, arguments: step.call(arguments)), inputs)

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return tuple(flat)


def _clearing(function: Callable[..., Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Takes its list apart, as compiled code does."""

    def call(arguments: list[Any]) -> Sequence[Any]:
        values = tuple(arguments)
        arguments.clear()
        return function(*values)

    return call


def piece(name: str, function: Callable[..., Sequence[Any]]) -> BoundStep:
    return BoundStep("piece", name, _clearing(function))


def brk(name: str, function: Callable[..., Sequence[Any]]) -> BoundStep:
    return BoundStep("break", name, _clearing(function))


def only(step: BoundStep) -> ToyPlan:
    """A plan of one step."""
    return ToyPlan([(step, ("x",), ("y",))], ("y",))


def out_break_plan() -> ToyPlan:
    """piece -> break with an out-argument -> piece."""

    def attend(q: torch.Tensor, out: torch.Tensor) -> Sequence[Any]:
        out.copy_(q.cumsum(0))
        return ()

    return ToyPlan(
        [
            (piece("piece_00", lambda x: (x * 2, torch.empty_like(x))), ("x",), ("q", "out")),
            (brk("break_01", attend), ("q", "out"), ()),
            (piece("piece_02", lambda out, x: (out + x,)), ("out", "x"), ("y",)),
        ],
        ("y",),
    )


def fresh_break_plan() -> ToyPlan:
    """piece -> break with a fresh result -> piece."""
    return ToyPlan(
        [
            (piece("piece_00", lambda x: (x * 2,)), ("x",), ("q",)),
            (brk("break_01", lambda q: (q.relu() + 1,)), ("q",), ("r",)),
            (piece("piece_02", lambda r, x: (r - x,)), ("r", "x"), ("y",)),
        ],
        ("y",),
    )


def tuple_break_plan() -> ToyPlan:
    """A break with two fresh results, one of which skips a piece and a second break."""
    return ToyPlan(
        [
            (piece("piece_00", lambda x: (x + 3,)), ("x",), ("q",)),
            (brk("break_01", lambda q: (q * 2, q.neg())), ("q",), ("a", "b")),
            (piece("piece_02", lambda a: (a.sin(),)), ("a",), ("s",)),
            (brk("break_03", lambda s: (s + 1,)), ("s",), ("t",)),
            (piece("piece_04", lambda t, b: (t * b, t[:, :2])), ("t", "b"), ("y", "z")),
        ],
        ("y", "z"),
    )


def edges_plan() -> ToyPlan:
    """Breaks first, last and next to each other; a piece that hands an input and an int through."""
    return ToyPlan(
        [
            (brk("break_00", lambda x: (x + 1,)), ("x",), ("a",)),
            (brk("break_01", lambda a: (a * a,)), ("a",), ("b",)),
            (piece("piece_02", lambda b, x: (b - x, x, int(x.shape[0]))), ("b", "x"), ("c", "same", "n")),
            (brk("break_03", lambda c, n: (c * n,)), ("c", "n"), ("d",)),
            (brk("break_04", lambda d: (d - 1, d)), ("d",), ("e", "f")),
        ],
        ("e", "f", "same", "n"),
    )


PLANS: dict[str, Callable[[], ToyPlan]] = {
    "out_argument": out_break_plan,
    "fresh": fresh_break_plan,
    "tuple": tuple_break_plan,
    "edges": edges_plan,
}


def make_buffers(capacity: int, device: torch.device | str = "cpu", names: Sequence[str] = ("x",)) -> list[StaticBuffer]:
    return [
        StaticBuffer(BufferSpec(name=name, shape=("tokens", WIDTH), dtype=torch.float32), capacity={"tokens": capacity}, device=device)
        for name in names
    ]


def make_manager(
    plan: ToyPlan, *, capacity: int = 16, device: torch.device | str = "cpu", backend: GraphBackend | None = None, **options: Any
) -> GraphManager:
    return GraphManager(plan, backend or make_backend(device), inputs=make_buffers(capacity, device, plan.inputs), **options)


def both_modes(ladder: Ladder) -> tuple[Descriptor, ...]:
    """PIECEWISE and FULL for every size."""
    return plan_descriptors(ladder, ConfiguredMode.PIECEWISE) + plan_descriptors(ladder, ConfiguredMode.FULL)


def data(rows: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def run_padded(manager: GraphManager, descriptor: Descriptor, x: torch.Tensor) -> list[Any]:
    """Write, run, take the rows of `x`."""
    manager.inputs[0].write(x, descriptor.sizes("tokens"))
    return manager.run(descriptor).clone(x.shape[0])
