"""What a graph backend owes the manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rung.compile.bound import BoundStep


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Nodes of graphs by type. Child graphs count with what is inside of them."""

    kernels: int = 0
    copies: int = 0
    fills: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        return self.kernels + self.copies + self.fills + self.others

    def __add__(self, other: NodeCounts) -> NodeCounts:
        return NodeCounts(self.kernels + other.kernels, self.copies + other.copies, self.fills + other.fills, self.others + other.others)


class GraphPool(ABC):
    """Memory shared by the graphs of one manager, which replays them one at a time.

    Memory that is free when a graph is captured may be used by that graph, so a replay may overwrite everything in the pool but what its
    own program still needs. The pool stays usable when all its graphs were released."""

    shares: ClassVar[bool]  # whether a capture reuses memory that is free in the pool, so that smaller sizes cost little after a larger one

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` belongs to the pool."""

    @abstractmethod
    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep it from being reused by later captures, for memory of the pool; `tensor` itself,
        which is then held strongly, for any other. Valid as long as the pool."""

    @abstractmethod
    def bytes(self) -> int:
        """Device memory held by the pool."""

    @abstractmethod
    def executable_bytes(self) -> int:
        """Memory that executable graphs hold, beside an unknown constant: the difference of two readings is what came between them."""

    @abstractmethod
    def poison(self) -> None:
        """Fill all memory of the pool with bytes of ones (NaN in every floating type). Whatever a replay does not write shows."""


class CapturedGraph(ABC):
    """One recorded piece of work. `replay` repeats it on the caller's current stream with the addresses and host values of the capture.
    `nodes` is None where nobody can count them."""

    nodes: NodeCounts | None = None

    @abstractmethod
    def replay(self) -> None: ...

    @abstractmethod
    def release(self) -> None:
        """Give the executable back; replaying afterwards is an error of the caller. Releasing twice is harmless."""


class StepOrder:
    """Orders the steps of one manager on the device: they share memory, so a step on another stream waits for the step before it.

    Host threads are ordered by the manager's lock, which whoever calls `step` holds. This one is for backends without streams."""

    def step(self) -> AbstractContextManager[Any]:
        """Call before anything of a step is enqueued, its inputs too; inside the block the manager's device is the current one."""
        return nullcontext()


class GraphBackend(ABC):
    """Records work and replays it. Stateless between sessions: pools and graphs carry all state, so one backend may serve many managers.

    The order is: `session` around everything that captures (warm-up runs too), inside it `capture` around each graph, and inside that
    `call_piece` for compiled pieces, while everything else just runs. Captures do not nest. A capture whose body raises leaves the pool
    usable, the stream not capturing and the graph released, and the exception passes through."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def why_not(cls, device: torch.device) -> str | None:
        """The reason why the backend cannot serve `device` here, or None when it can."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # Bytes of device memory that an executable graph and each of its nodes take, where small captures cannot show it; None: they can.
    executable_cost: ClassVar[tuple[float, float] | None] = None

    def why_no_nodes(self) -> str | None:
        """Why graphs have no `nodes`, None when they have."""
        return None

    def repeats_launches(self) -> bool:
        """Whether what our launchers launch inside of a capture may be enqueued again in place of the graph, and is the faster for it."""
        return False

    @abstractmethod
    def new_pool(self) -> GraphPool:
        """A pool that the caller owns."""

    def new_order(self) -> StepOrder:
        """A step order that the caller owns."""
        return StepOrder()

    def give_back(self) -> None:
        """Return memory of freed pools to the device, for whoever else shares it."""
        return None

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """Make the capture stream current; work enqueued before is waited for, and work enqueued after waits for the session."""

    @abstractmethod
    def capture(self, pool: GraphPool, generators: Sequence[torch.Generator] = ()) -> AbstractContextManager[CapturedGraph]:
        """Record what the body enqueues. The graph may be replayed once the block was left. Random numbers may come from the default
        generator of the device and from `generators`; each replay advances them."""

    @abstractmethod
    def call_piece(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        """Call a compiled piece inside a capture. The piece may clear `arguments`."""

    @abstractmethod
    def settle(self, graph: CapturedGraph) -> None:
        """Make the results of a graph just captured real, where capturing did not execute it: a break that follows may index with them."""

    @abstractmethod
    def upload(self, graph: CapturedGraph) -> None:
        """Bring a graph just captured to where it runs, so that its memory is taken now and not at its first replay."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def reclaim(self) -> None:
        """Give the memory of pools that are gone back to the device. Not inside of a capture."""
