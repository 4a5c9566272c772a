"""A captured step as a flat list of actions: graph launches and the breaks between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch

from rung.compile.bound import BoundStep
from rung.counters import Count
from rung.errors import CaptureError
from rung.graphs.backends.base import CapturedGraph, NodeCounts
from rung.graphs.descriptor import Descriptor
from rung.graphs.outputs import describe
from rung.graphs.repeats import BreakRepeats, Change, ProgramRepeats, Run


class PieceReason(StrEnum):
    """Why a graph between breaks stays a graph where launches could take its place, counted at its capture as `piece_graph.<reason>`."""

    OTHER_NODES = "other_nodes"
    FEW_BYTES = "few_bytes"
    UNREPEATABLE = "unrepeatable"

    @property
    def counter(self) -> str:
        return f"piece_graph.{self}"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    PieceReason.OTHER_NODES: "they hold other work than launches of our kernels",
    PieceReason.FEW_BYTES: "a launch would cost the host more than the device takes to read its weights",
    PieceReason.UNREPEATABLE: "a launch in them cannot be repeated",
}


class GraphLaunch:
    """Replays one graph. `reason`: why no launches take its place, where they could."""

    __slots__ = ("graph", "name", "reason", "run")
    kind = "graph"

    def __init__(self, name: str, graph: CapturedGraph, reason: PieceReason | None = None) -> None:
        self.name = name
        self.graph = graph
        self.reason = reason
        self.run = graph.replay


class PieceLaunches(GraphLaunch):
    """Replays what a graph holds as launches, each of which may start while the one before it runs, those of the breaks around it too;
    between a graph and its neighbours on the stream the device stands still for some microseconds."""

    __slots__ = ()
    kind = "launches"

    def __init__(self, name: str, graph: CapturedGraph, repeat: Run) -> None:
        super().__init__(name, graph)
        self.run = repeat


class PreboundBreak:
    """Calls a break with the arguments of the capture. Later graphs read its outputs where the capture put them, so fresh ones are copied
    there; an output that lies there already (an out-argument, a buffer of the break's own) is left alone. `attention` is the call of a
    break that is one of our attention."""

    __slots__ = ("_arguments", "_call", "_outputs", "attention", "name")
    kind = "break"

    def __init__(self, step: BoundStep, arguments: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.name = step.name
        self._call = step.call
        self._arguments = tuple(arguments)
        self._outputs = tuple(outputs)
        self.attention = None if step.attention is None else step.attention(self._arguments)

    def run(self) -> None:
        fresh = self._call(list(self._arguments))
        if not self._outputs and not fresh:
            return
        if len(fresh) != len(self._outputs):
            self._refuse(f"{len(self._outputs)} outputs", f"{len(fresh)}")
        for index, (old, new) in enumerate(zip(self._outputs, fresh, strict=True)):
            if not isinstance(old, torch.Tensor):
                if new != old:
                    self._refuse(f"the value {old!r} as output {index}", repr(new))
            elif not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
                self._refuse(f"{old.dtype} {list(old.shape)} as output {index}", describe(new))
            elif new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
                self._land(old, new, index)

    def _land(self, old: torch.Tensor, new: torch.Tensor, index: int) -> None:
        """Copy to the address of the capture. Along expanded dimensions one element stands for all, in both or it cannot be copied."""
        for dim, (stride, size) in enumerate(zip(old.stride(), old.shape, strict=True)):
            if stride == 0 and size > 1:
                if new.stride(dim) != 0:
                    self._refuse(f"an expanded tensor as output {index}", "one that is not")
                old, new = old.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
        old.copy_(new)

    def _refuse(self, expected: str, came: str) -> None:
        raise CaptureError(
            f"break {self.name!r} returned {expected} when it was captured, now {came}: the graphs behind it would read stale data",
            hint="a break must return the same number, shapes and host values in every step of one size; use an out-argument",
            piece=self.name,
        )


class ReplayProgram:
    """One descriptor's actions and where its outputs land. Holds strongly what the graphs read outside of their pool, so that a
    replay never reads freed memory. With `repeats` attention breaks run as launches where nothing else is left to decide. Not thread-safe:
    the manager's lock covers it."""

    def __init__(
        self,
        descriptor: Descriptor,
        actions: Sequence[GraphLaunch | PreboundBreak],
        outputs: Sequence[Any],
        keep: Sequence[Any],
        repeats: BreakRepeats | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.actions = tuple(actions)
        self.outputs = tuple(outputs)
        self._keep = tuple(keep)
        self._changes: list[Change] = []
        self._runs: tuple[Run, ...] = tuple(action.run for action in self.actions)
        calls = {
            index: action.attention
            for index, action in enumerate(self.actions)
            if isinstance(action, PreboundBreak) and action.attention is not None
        }
        self._repeats = ProgramRepeats(self._runs, calls, repeats) if repeats is not None and calls else None

    @property
    def num_graphs(self) -> int:
        return sum(isinstance(action, GraphLaunch) for action in self.actions)

    @property
    def pieces_launched(self) -> int:
        """How many of its graphs a replay runs as launches."""
        return sum(isinstance(action, PieceLaunches) for action in self.actions)

    @property
    def graph_reasons(self) -> Counter[PieceReason]:
        """Why how many of its graphs stay graphs."""
        return Counter(action.reason for action in self.actions if isinstance(action, GraphLaunch) and action.reason is not None)

    @property
    def nodes(self) -> NodeCounts | None:
        """Nodes of all graphs, None where they are not counted."""
        counts = [action.graph.nodes for action in self.actions if isinstance(action, GraphLaunch)]
        known = [one for one in counts if one is not None]
        return sum(known, NodeCounts()) if len(known) == len(counts) else None

    def replay(self) -> None:
        if len(self.actions) == 1 == len(self._runs):  # one graph: no Python of a break
            self._runs[0]()
            return
        with torch.no_grad():
            if self._repeats is not None:
                self._repeats.replay(self._changed)
                return
            for run in self._runs:
                run()

    def wrap(self, change: Change) -> Callable[[], None]:
        """Replace what a replay calls, for tools that look on; what is returned undoes it."""
        self._changes.append(change)
        self._renew()

        def undo() -> None:
            self._changes.remove(change)
            self._renew()

        return undo

    def _renew(self) -> None:
        self._runs = self._changed([action.run for action in self.actions])
        if self._repeats is not None:
            self._repeats.forget()

    def _changed(self, runs: Sequence[Run]) -> tuple[Run, ...]:
        for change in self._changes:
            runs = change(runs)
        return tuple(runs)

    def release(self) -> None:
        """Free the graphs; the program cannot be replayed any more."""
        for action in self.actions:
            if isinstance(action, GraphLaunch):
                action.graph.release()
        self.actions = self.outputs = self._keep = self._runs = ()
        self._repeats = None


def piece_lines(counts: Mapping[str, int]) -> list[str]:
    """One line for each way in which graphs between breaks were captured where launches could take their place, among all counts."""
    ways = [
        (Count.LAUNCHED_PIECES, "as the launches they hold"),
        *((reason.counter, f"as graphs: {reason.sentence}") for reason in PieceReason),
    ]
    return [f"{counts[name]} graphs between breaks were captured to be replayed {how}" for name, how in ways if counts.get(name, 0)]
