"""Graphs against their plan: equal, or the first step that differs by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rung.graphs import Descriptor, GraphManager, GraphMode
from rung.graphs.backends import recorded
from rung.graphs.verify import NOWHERE, Setup, check_graph, first_difference, relative_error
from tests.graphs.toys import PLANS, ToyPlan, brk, data, make_manager, piece

MODES = [GraphMode.PIECEWISE, GraphMode.FULL]


def setup_of(manager: GraphManager, size: int, x: torch.Tensor) -> Setup:
    @contextmanager
    def setup(poison: bool) -> Iterator[None]:
        view = manager.inputs[0].write(x, {"tokens": size})
        if poison:
            view[x.shape[0] :] = float("nan")
        yield

    return setup


def check(plan: ToyPlan, mode: GraphMode, *, before: Any = None, rows: int = 3, size: int = 4) -> Any:
    """The difference for `rows` real rows; `before` is called between capture and check."""
    manager = make_manager(plan)
    descriptor = Descriptor(mode=mode, num_tokens=size)
    setup = setup_of(manager, size, data(rows, 1))
    with setup(False):
        manager.capture([descriptor])
    if before is not None:
        before(manager)
    cut = lambda flat: [v[:rows] if isinstance(v, torch.Tensor) else v for v in flat]  # noqa: E731
    return check_graph(manager, descriptor, setup, cut)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLANS)
def test_graphs_that_are_right_have_no_difference(name: str, mode: GraphMode) -> None:
    assert check(PLANS[name](), mode) is None


def stale_break(stale: str) -> ToyPlan:
    """Pieces around two breaks; the break named `stale` takes a number of the host that is another one while a graph is captured."""

    def scaled(name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (3.0 if name == stale and recorded._open.get() is not None else 1.0)

    def attend(q: torch.Tensor, out: torch.Tensor) -> Sequence[Any]:
        out.copy_(scaled("break_01", q))
        return ()

    return ToyPlan(
        [
            (piece("piece_00", lambda x: (x * 1, torch.empty_like(x))), ("x",), ("q", "out")),
            (brk("break_01", attend), ("q", "out"), ()),
            (piece("piece_02", lambda out: (out.sin(),)), ("out",), ("h",)),
            (brk("break_03", lambda h: (scaled("break_03", h),)), ("h",), ("r",)),
            (piece("piece_04", lambda r: (r + 1,)), ("r",), ("y",)),
        ],
        ("y",),
    )


@pytest.mark.parametrize("step", ["break_01", "break_03"])
def test_break_that_is_stale_in_a_full_graph_is_named(step: str) -> None:
    found = check(stale_break(step), GraphMode.FULL)
    assert found is not None
    assert found.step == step
    assert check(stale_break(step), GraphMode.PIECEWISE) is None  # there it runs between the graphs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["piece_00", "piece_02", "piece_04"])
def test_seeded_fault_of_a_piece_is_named(monkeypatch: pytest.MonkeyPatch, name: str, mode: GraphMode) -> None:
    """A piece that computes something else when it is captured."""
    call_piece = recorded.RecordedBackend.call_piece

    def wrong(self: recorded.RecordedBackend, step: Any, arguments: list[Any]) -> Sequence[Any]:
        outputs = call_piece(self, step, arguments)
        return [outputs[0] + 1, *outputs[1:]] if step.name == name else outputs

    monkeypatch.setattr(recorded.RecordedBackend, "call_piece", wrong)
    found = check(PLANS["tuple"](), mode)
    assert found is not None
    assert found.step == name
    assert "output 0 row 0" in found.what


def test_padding_that_reaches_real_rows_is_told_from_a_wrong_graph() -> None:
    plan = ToyPlan(
        [
            (piece("piece_00", lambda x: (x * 2,)), ("x",), ("a",)),
            (piece("piece_01", lambda a: (a - a.mean(0),)), ("a",), ("y",)),
        ],
        ("y",),
    )
    found = check(plan, GraphMode.FULL)
    assert found is not None
    assert found.step == "piece_01"
    assert found.what.startswith("padding reaches real rows: output 0 row 0")


def test_memory_used_again_too_early_is_no_steps_fault() -> None:
    """The program itself is spoilt; a capture that keeps everything is right."""

    def spoil(manager: GraphManager) -> None:
        program = manager.program(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4))
        program.wrap(lambda runs: [*runs, lambda: program.outputs[0].fill_(7)])

    found = check(PLANS["fresh"](), GraphMode.PIECEWISE, before=spoil)
    assert found is not None
    assert found.step == NOWHERE


def test_differences_are_placed() -> None:
    want = torch.zeros(3, 2)
    got = want.clone()
    got[1, 1] = 5
    found = first_difference([want, got], [want, want])
    assert found is not None
    assert found.what == "output 1 row 1: 5 instead of 0"
    nan = torch.full((2,), float("nan"))
    assert first_difference([nan], [nan.clone()]) is None
    assert first_difference([torch.tensor(-0.0)], [torch.tensor(0.0)]) is not None


def test_relative_error() -> None:
    a = torch.ones(4)
    assert relative_error(a, a) == 0
    assert relative_error(a * 1.5, a) == pytest.approx(0.5)
    assert relative_error(a[:2], a) == float("inf")
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")
