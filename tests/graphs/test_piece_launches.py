"""Graphs between breaks that are replayed as the launches they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rung.counters import Count
from rung.graphs import Descriptor, GraphMode
from rung.graphs import capture as capture_module
from rung.graphs.backends.base import CapturedGraph, GraphPool, NodeCounts
from rung.graphs.backends.recorded import RecordedBackend
from rung.graphs.program import PieceLaunches, PieceReason, piece_lines
from rung.launch.record import current_record
from tests.graphs.toys import WIDTH, ToyPlan, brk, data, make_manager, only, piece, run_padded

PIECEWISE_4 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)
FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)


class CountingBackend(RecordedBackend):
    """Says of each graph that it has the nodes that the test wants, and of launches that they may be repeated."""

    nodes = NodeCounts(kernels=1)

    def repeats_launches(self) -> bool:
        return True

    @contextmanager
    def capture(self, pool: GraphPool, generators: Sequence[torch.Generator] = ()) -> Iterator[CapturedGraph]:
        with super().capture(pool, generators) as graph:
            yield graph
        graph.nodes = self.nodes


class Launching:
    """x -> 2 * x by a launch, into memory of the capture; counts how often its Python and its launch ran."""

    def __init__(self) -> None:
        self.python = self.launched = 0
        self.launches = 1
        self.refuse = ""
        self.scratch = 0  # elements of a record's workspace that the launch would use

    def __call__(self, x: torch.Tensor) -> Sequence[Any]:
        self.python += 1
        out = torch.empty_like(x)
        torch.mul(x, 2, out=out)

        def launch() -> None:  # keeps both: the toy's memory is torch's
            self.launched += 1
            torch.mul(x, 2, out=out)

        if (record := current_record.get()) is not None:
            for _ in range(self.launches):
                record.called(launch)
            if self.refuse:
                record.refuse(self.refuse)
            if self.scratch:
                record.memory.take((self.scratch,), torch.float32, x.device)
        return (out,)


def plan_of(double: Launching) -> ToyPlan:
    return ToyPlan(
        [
            (piece("piece_00", double), ("x",), ("y",)),
            (brk("break_01", lambda y: (y + 1,)), ("y",), ("z",)),
            (piece("piece_02", double), ("z",), ("w",)),
        ],
        ("w",),
    )


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "LAUNCHED_BYTES", 0)


@pytest.mark.usefixtures("all_sizes")
def test_a_graph_of_launches_alone_is_replayed_as_launches() -> None:
    double = Launching()
    manager = make_manager(plan_of(double), backend=CountingBackend(torch.device("cpu"), scramble=False))
    manager.capture([PIECEWISE_4])
    program = manager.program(PIECEWISE_4)
    assert [type(action) is PieceLaunches for action in program.actions] == [True, False, True]
    assert (program.num_graphs, program.pieces_launched, manager.counters[Count.LAUNCHED_PIECES]) == (2, 2, 2)
    before = double.python
    for seed in range(3):
        x = data(4, seed)
        assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], 2 * (2 * x + 1))
    assert (double.python, double.launched) == (before, 6)


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize(
    "nodes", [NodeCounts(kernels=2), NodeCounts(kernels=1, copies=1), NodeCounts(kernels=1, fills=1), NodeCounts(), None], ids=str
)
def test_what_else_a_graph_holds_keeps_it_a_graph(nodes: NodeCounts | None) -> None:
    double = Launching()
    backend = CountingBackend(torch.device("cpu"))
    backend.nodes = nodes  # type: ignore[assignment]
    manager = make_manager(plan_of(double), backend=backend)
    manager.capture([PIECEWISE_4])
    assert manager.counters[Count.LAUNCHED_PIECES] == 0
    assert manager.counters[PieceReason.OTHER_NODES.counter] == 2
    x = data(4, 0)
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], 2 * (2 * x + 1))
    assert double.launched == 0


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize(("refuse", "scratch"), [("for a test", 0), ("", 8)], ids=["refused", "with memory of the record's"])
def test_a_launch_that_cannot_be_repeated_keeps_it_a_graph(refuse: str, scratch: int) -> None:
    double = Launching()
    double.refuse, double.scratch = refuse, scratch
    manager = make_manager(plan_of(double), backend=CountingBackend(torch.device("cpu")))
    manager.capture([PIECEWISE_4])
    assert manager.counters[Count.LAUNCHED_PIECES] == 0
    assert piece_lines(manager.counters) == [
        "2 graphs between breaks were captured to be replayed as graphs: a launch in them cannot be repeated"
    ]


def test_small_pieces_and_full_graphs_stay_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CountingBackend(torch.device("cpu"))
    manager = make_manager(plan_of(Launching()), backend=backend)
    manager.capture([PIECEWISE_4])
    assert manager.counters[Count.LAUNCHED_PIECES] == 0
    monkeypatch.setattr(capture_module, "LAUNCHED_BYTES", 0)
    backend.nodes = NodeCounts(kernels=2)  # both pieces
    manager.capture([FULL_4])
    assert manager.counters[Count.LAUNCHED_PIECES] == 0


@pytest.mark.parametrize(("launches", "launched"), [(1, 1), (2, 0)])
def test_each_launch_wants_its_bytes(launches: int, launched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "LAUNCHED_BYTES", 4 * WIDTH * 4)  # what the piece is given at four rows
    double = Launching()
    double.launches = launches
    backend = CountingBackend(torch.device("cpu"))
    backend.nodes = NodeCounts(kernels=launches)
    manager = make_manager(only(piece("piece_00", double)), backend=backend)
    manager.capture([PIECEWISE_4])
    assert manager.counters[Count.LAUNCHED_PIECES] == launched
    assert manager.counters[PieceReason.FEW_BYTES.counter] == 1 - launched


@pytest.mark.usefixtures("all_sizes")
def test_other_backends_are_not_asked() -> None:
    manager = make_manager(plan_of(Launching()))
    manager.capture([PIECEWISE_4])
    assert piece_lines(manager.counters) == []
