"""Breaks that can be captured run in one graph with their neighbours; those that decide on the host cut it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rung.compile.bound import BoundStep, Capture
from rung.errors import CaptureError
from rung.graphs import Descriptor, GraphMode
from rung.graphs.capture import has_host_breaks
from tests.graphs.toys import ToyPlan, brk, data, make_manager, piece, run_padded

MODES = [GraphMode.PIECEWISE, GraphMode.FULL]


def break_of(capture: Capture, name: str, function: Callable[..., Sequence[Any]]) -> BoundStep:
    return BoundStep("break", name, brk(name, function).call, capture)


def alternating(*kinds: Capture) -> ToyPlan:
    """x + 1, then for each kind a break that doubles and a piece that adds 1."""
    walk = [(piece("piece_00", lambda x: (x + 1,)), ("x",), ("x",))]
    for index, kind in enumerate(kinds):
        walk.append((break_of(kind, f"break_{index}", lambda x: (x * 2,)), ("x",), ("x",)))
        walk.append((piece(f"piece_{index + 1:02}", lambda x: (x + 1,)), ("x",), ("x",)))
    return ToyPlan(walk, ("x",))


A, F, N = Capture.ALWAYS, Capture.FULL, Capture.NEVER


@pytest.mark.parametrize(
    ("kinds", "mode", "launches"),
    [
        ((A, A), GraphMode.PIECEWISE, 1),
        ((A, F, A), GraphMode.PIECEWISE, 2),
        ((F, F), GraphMode.PIECEWISE, 3),
        ((A, F, A), GraphMode.FULL, 1),
        ((F, N, F, F), GraphMode.FULL, 2),
        ((N,), GraphMode.PIECEWISE, 2),
    ],
)
def test_a_program_has_one_launch_for_each_run_between_host_breaks(kinds: tuple[Capture, ...], mode: GraphMode, launches: int) -> None:
    plan = alternating(*kinds)
    manager = make_manager(plan)
    descriptor = Descriptor(mode=mode, num_tokens=8)
    (entry,) = manager.capture([descriptor]).entries
    assert entry.num_graphs == launches
    for seed in range(2):
        manager.poison()
        x = data(8, seed)
        torch.testing.assert_close(run_padded(manager, descriptor, x)[0], plan(x)[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_break_that_decides_on_the_host_is_fresh_in_every_mode(mode: GraphMode) -> None:
    factor = [2.0]
    walk = [
        (piece("piece_00", lambda x: (x + 1,)), ("x",), ("q",)),
        (break_of(N, "break_01", lambda q: (q * factor[0],)), ("q",), ("r",)),
        (piece("piece_02", lambda r: (r - 1,)), ("r",), ("y",)),
    ]
    plan = ToyPlan(walk, ("y",))
    assert has_host_breaks(plan)
    manager = make_manager(plan)
    descriptor = Descriptor(mode=mode, num_tokens=4)
    manager.capture([descriptor])
    factor[0] = 5.0
    x = data(4, 1)
    torch.testing.assert_close(run_padded(manager, descriptor, x)[0], (x + 1) * 5 - 1)


def test_numbers_between_pieces_open_no_graph() -> None:
    walk = [
        (break_of(F, "break_00", lambda x: (x + 1, 3)), ("x",), ("y", "n")),
        (break_of(A, "sizes", lambda n: (n * 2,)), ("n",), ("m",)),
    ]
    manager = make_manager(ToyPlan(walk, ("y", "m")))
    descriptor = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)
    (entry,) = manager.capture([descriptor]).entries
    assert entry.num_graphs == 0
    assert run_padded(manager, descriptor, data(4, 1))[1] == 6


@pytest.mark.parametrize("at", [0, 1, 2])
def test_failure_inside_a_joined_run_names_the_step_and_leaves_the_manager_usable(at: int) -> None:
    plan = alternating(A, A)
    fails = [False]

    def maybe(x: torch.Tensor) -> Sequence[Any]:
        if fails[0]:
            raise ValueError("out of luck")
        return (x + 0,)

    walk = list(plan.walk)
    walk[2 * at] = (piece("culprit", maybe), ("x",), ("x",))
    manager = make_manager(ToyPlan(walk, ("x",)))
    descriptors = [Descriptor(mode=GraphMode.PIECEWISE, num_tokens=size) for size in (4, 2)]
    fails[0] = True
    with pytest.raises(CaptureError, match="culprit"):
        manager.capture(descriptors[:1])
    fails[0] = False
    manager.capture(descriptors)
    x = data(2, 3)
    torch.testing.assert_close(run_padded(manager, descriptors[1], x)[0], ToyPlan(walk, ("x",))(x)[0])
