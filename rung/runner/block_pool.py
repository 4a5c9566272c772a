"""Which KV-cache blocks of one group are free, who shares the others, and what each still holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rung.errors import InternalError

NULL_BLOCK = 0  # padded block table entries point here; no request owns it


class BlockPool:
    """`allocate` gives a block its first owner, `share` a further one, `free` takes one away.

    A block that is kept under a key can be found by it, owned or free, until it is given out again. Blocks without a key are given out
    first, the last freed before others; then those with a key, the least recently freed first. The null block is never given out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))  # in the order of giving out
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when there are fewer."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
            self._forget(block)
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a block that was found."""
        if not self._owners[block]:
            del self._free[block]
        self._owners[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, those of a request in the order of its tokens: later ones are given out again before earlier ones."""
        for block in reversed(blocks):
            if not self._owners[block]:
                raise InternalError(f"block {block} is freed but nobody owns it")
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def keep(self, block: int, key: bytes) -> None:
        """Let an owned block be found. The first block of a key stays the one that is found."""
        assert self._owners[block]
        if key not in self._block_of and block not in self._key_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def is_free(self, block: int) -> bool:
        return not self._owners[block]

    def forget_all(self) -> None:
        """Nothing can be found any more."""
        self._key_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
