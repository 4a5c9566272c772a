"""Whether graphs compute what their plan computes, and which step is the first that does not.

A graph runs the kernels of its plan at the same padded size, so their results are compared bit by bit. What runs other kernels (the module
itself, the plan at the exact size) agrees within rounding only, which `relative_error` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rung.compile.bound import BoundPlan, BoundStep, StepRunner, call_step
from rung.graphs.capture import capture_program, warm_up
from rung.graphs.descriptor import Descriptor
from rung.graphs.manager import GraphManager
from rung.graphs.outputs import describe

Setup = Callable[[bool], AbstractContextManager[Any]]  # (poison the padding?) -> writes one data set, and the context that a step runs in
Cut = Callable[[Sequence[Any]], list[Any]]  # flat outputs -> without padding

TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
NOWHERE = "no single step: it is gone when intermediate results are kept, so memory is used again too early"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two runs differ. `step` is the first piece or break whose results differ."""

    what: str  # which output, where in it, both values
    step: str = ""


def relative_error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of `want`; 0 or infinity for what is no float tensor, and infinity for other NaNs."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return 0.0 if got == want else float("inf")
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(got, want) else float("inf")
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    a, b = got.double().nan_to_num(), want.double().nan_to_num()
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm else float((a - b).norm())


def first_difference(got: Sequence[Any], want: Sequence[Any], name: str = "output") -> Difference | None:
    """The first value that is not equal bit by bit."""
    for index, (mine, other) in enumerate(zip(got, want, strict=True)):
        if not _same_bits(mine, other):
            return Difference(what=f"{name} {index}{_place(mine, other)}")
    return None


def check_graph(manager: GraphManager, descriptor: Descriptor, setup: Setup, cut: Cut) -> Difference | None:
    """Compare a replay with the plan at the same size, bit by bit: same inputs, memory of the pool and padding poisoned. Then the plan with
    and without poison in the padding, real rows only. Captures the graph if it is not there."""
    if not manager.can_replay(descriptor):
        with setup(False):
            manager.capture([descriptor])
    clean = _plan_run(manager, descriptor, setup, cut, poison=False)
    poisoned = _plan_run(manager, descriptor, setup, cut, poison=True)
    leak = first_difference(poisoned, clean)
    if leak is not None:
        return Difference(what=f"padding reaches real rows: {leak.what}", step=_first_leak(manager, descriptor, setup))
    manager.poison()
    with setup(True):
        replayed = _copied(cut(manager.run(descriptor).borrow()))
    found = first_difference(replayed, poisoned)
    return None if found is None else Difference(what=found.what, step=_first_step(manager, descriptor, setup))


def _plan_run(manager: GraphManager, descriptor: Descriptor, setup: Setup, cut: Cut, *, poison: bool) -> list[Any]:
    with setup(poison), torch.no_grad():
        return _copied(cut(manager.plan.run_steps(manager.views(descriptor), call_step)))


class _Watched:
    """A plan whose runs keep what every step was given and returned, so that all of it can be looked at in the end."""

    def __init__(self, plan: BoundPlan) -> None:
        self._plan = plan
        self.results: list[tuple[str, list[Any]]] = []  # step -> what it returned and, for a break, what it was given
        self.changed: set[int] = set()  # addresses of memory that a break wrote

    @property
    def steps(self) -> Sequence[BoundStep]:
        return self._plan.steps

    def __call__(self, *inputs: Any) -> Any:
        return self._plan(*inputs)

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return self._plan.restore(flat, inputs)

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner) -> list[Any]:
        self.results.clear()

        def watched(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
            given = list(arguments) if step.kind == "break" else []
            outputs = list(runner(step, arguments))
            self.results.append((step.name, [*outputs, *given]))
            return outputs

        return self._plan.run_steps(inputs, watched)

    def run_now(self, inputs: Sequence[Any]) -> None:
        """Run without graphs, noting what breaks write into."""

        def call(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
            given = [value for value in arguments if isinstance(value, torch.Tensor)] if step.kind == "break" else []
            before = _copied(given)
            outputs = step.call(arguments)
            self.changed |= {_address(new) for new, old in zip(given, before, strict=True) if not _same_bits(new, old)}
            return outputs

        with torch.no_grad():
            self.run_steps(inputs, call)


def _first_step(manager: GraphManager, descriptor: Descriptor, setup: Setup) -> str:
    """The first step whose results differ between the plan and a graph of it that keeps all of them."""
    reference, probe = _Watched(manager.plan), _Watched(manager.plan)
    inputs, backend = manager.views(descriptor), manager.backend
    with setup(True):
        reference.run_now(inputs)
    want = [(name, _copied(values)) for name, values in reference.results]
    pool = backend.new_pool()
    with backend.session(), torch.inference_mode(False), torch.no_grad():
        with manager.prepare(descriptor):
            warm_up(manager.plan, backend.device, descriptor, inputs, manager.generators)
        with manager.prepare(descriptor):
            program = capture_program(probe, backend, pool, descriptor, inputs, manager.generators)
    try:
        with setup(True), torch.no_grad():
            program.replay()
        return next(_differing(reference, want, probe.results), NOWHERE)
    finally:
        backend.synchronize()
        probe.results.clear()
        program.release()


def _first_leak(manager: GraphManager, descriptor: Descriptor, setup: Setup) -> str:
    """The first step whose leading rows depend on the padding."""
    runs = []
    for poison in (False, True):
        watched = _Watched(manager.plan)
        with setup(poison):
            watched.run_now(manager.views(descriptor))
        runs.append((watched, [(name, _copied(values)) for name, values in watched.results]))
    (reference, want), (_, got) = runs
    return next(_differing(reference, want, got, row=0), "a step that mixes later rows only")


def _differing(
    reference: _Watched, want: Sequence[tuple[str, list[Any]]], got: Sequence[tuple[str, list[Any]]], row: int | None = None
) -> Any:
    """Names of steps whose results differ, in order; only row `row` of each when given. Memory that a break writes later belongs to it."""
    kinds = {step.name: step.kind for step in reference.steps}
    for (name, wanted), (_, mine), (_, live) in zip(want, got, reference.results, strict=True):
        for a, b, holder in zip(mine, wanted, live, strict=True):
            later = isinstance(holder, torch.Tensor) and kinds[name] == "piece" and _address(holder) in reference.changed
            if not later and not _same_bits(_row(a, row), _row(b, row)):
                yield name
                break


def _row(value: Any, row: int | None) -> Any:
    return value[row] if row is not None and isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > row else value


def _copied(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _place(got: Any, want: Any) -> str:
    """The first place where two values differ, and what is there."""
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor) or got.shape != want.shape:
        return f" is {describe(got)} instead of {describe(want)}"
    places = (~((got == want) | ((got != got) & (want != want)))).nonzero()
    if not len(places):
        return " differs in the bits of zeros or NaNs"
    place = tuple(places[0].tolist())
    row = f" row {place[0]}" if place else ""
    return f"{row}: {got[place].item():.6g} instead of {want[place].item():.6g}"
