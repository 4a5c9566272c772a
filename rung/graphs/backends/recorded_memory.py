"""The memory model of the recorded backend: what a CUDA graph pool would reuse is scrambled here."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rung.errors import CaptureError
from rung.graphs.backends.base import GraphPool
from rung.torch_compat import storage_use_count


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made inside are neither inference tensors nor part of an autograd graph, so they can be written in any mode later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the same memory with the metadata of now, which later in-place view operations do not change."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        raise CaptureError(
            f"a tensor of layout {tensor.layout} on {tensor.device} cannot be recorded",
            hint="the recorded backend takes dense CPU tensors without conjugate or negative views",
        )
    with plain_tensors():
        return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the storage, 0 when it is empty."""
    return tensor.untyped_storage().data_ptr()


class Block:
    """One storage that a capture allocated. Our own references to it do not keep it in use."""

    __slots__ = ("_aliases", "born", "bytes", "dead_at")

    def __init__(self, tensor: torch.Tensor, born: int) -> None:
        with plain_tensors():
            self.bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._aliases: list[weakref.ref[torch.Tensor]] = []  # ours besides `bytes`
        self.born = born  # index of the graph that allocated it
        self.dead_at: int | None = None  # index of the first graph that could reuse it

    @property
    def in_use(self) -> bool:
        self._aliases = [alias for alias in self._aliases if alias() is not None]
        return storage_use_count(self.bytes) > 1 + len(self._aliases)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = alias_of(tensor)
        self._aliases.append(weakref.ref(alias))
        return alias

    def scramble(self) -> None:
        self.bytes.fill_(0xFF)  # NaN in every floating type, -1 in integers


RECORD_BYTES = 1024  # what a record counts as, so that the accounting of executables has something to count


class RecordedPool(GraphPool):
    """Blocks stay allocated, so each capture has addresses of its own; `scramble_for` destroys what sharing would have destroyed.

    When graph g replays, it may overwrite every block that was free when g was captured, and every block of a later graph, because that
    may lie where g had a temporary."""

    shares = False

    def __init__(self, scramble: bool) -> None:
        self.records = 0  # of all graphs that are not released
        self._scramble = scramble
        self._clock = 0
        self._blocks: dict[int, Block] = {}
        self._used: set[int] = set()  # blocks that were not dead when last looked at
        self._dirty: set[int] = set()  # blocks with contents

    def begin_graph(self) -> int:
        """The index of a new graph; memory that is free now can be reused by it."""
        self._clock += 1
        for key in [key for key in self._used if not self._blocks[key].in_use]:
            self._blocks[key].dead_at = self._clock
            self._used.discard(key)
        self.scramble_for(self._clock)
        return self._clock

    def end_graph(self, index: int) -> list[int]:
        """The blocks that graph `index` allocated and no longer needs: it destroys them itself at the end of each replay."""
        gone = [key for key in self._used if self._blocks[key].born == index and not self._blocks[key].in_use]
        for key in gone:
            self._blocks[key].dead_at = index
            self._used.discard(key)
        self.scramble(gone)
        return gone

    def born_in(self, index: int) -> set[int]:
        """The blocks that graph `index` allocated, and writes in each replay."""
        return {key for key, block in self._blocks.items() if block.born == index}

    def drop_graph(self, index: int) -> None:
        """Forget the blocks of a graph whose capture failed."""
        for key in self.born_in(index):
            del self._blocks[key]
            self._used.discard(key)
            self._dirty.discard(key)

    def add(self, tensor: torch.Tensor, index: int) -> None:
        """Note that graph `index` allocated the storage of `tensor`."""
        key = storage_key(tensor)
        if key and key not in self._blocks:
            self._blocks[key] = Block(tensor, index)
            self._used.add(key)
            self._dirty.add(key)

    def add_empty(self, tensor: torch.Tensor, index: int) -> None:
        """Like `add`, for memory without contents."""
        self.add(tensor, index)
        if storage_key(tensor):
            self.scramble([storage_key(tensor)])

    def scramble_for(self, index: int) -> None:
        """Destroy what a replay (or the capture) of graph `index` may overwrite."""
        self.scramble([key for key in self._dirty if self._lost_to(self._blocks[key], index)])

    def scramble(self, keys: list[int]) -> None:
        if self._scramble:
            for key in keys:
                self._blocks[key].scramble()
        self._dirty.difference_update(keys)

    def written(self, keys: set[int]) -> None:
        self._dirty |= keys

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._blocks.get(storage_key(tensor))
        return tensor if block is None else block.alias(tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._blocks

    def bytes(self) -> int:
        return sum(block.bytes.nbytes for block in self._blocks.values())

    def executable_bytes(self) -> int:
        return self.records * RECORD_BYTES

    def poison(self) -> None:
        for block in self._blocks.values():
            block.scramble()
        self._dirty.clear()

    @staticmethod
    def _lost_to(block: Block, index: int) -> bool:
        return block.born > index or (block.dead_at is not None and block.dead_at <= index and block.born != index)
