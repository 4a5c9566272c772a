"""The blocks of requests: what each owns in every KV-cache group, and the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from rung.runner.block_pool import NULL_BLOCK, BlockPool
from rung.runner.config import RunnerConfig
from rung.runner.kv_groups import first_block, group_blocks
from rung.runner.plan import BlockIds
from rung.runner.request import Request

_KEY_BYTES = 16
_AHEAD = 3  # blocks that a growing request gets beyond those it needs, where no group gives blocks back behind a window
_PLENTY = 2  # while so many for each request are free


@dataclass(slots=True)
class _Held:
    """A request's row in the block table of each group; all rows are equally long."""

    rows: tuple[list[int], ...]
    num_null: list[int]  # entries at the front of each row that are the null block
    num_told: int  # entries that the runner knows
    nulls_told: list[int] = field(default_factory=list)
    num_kept: int = 0  # full blocks that can be found, or could not be kept


class KVBlocks:
    """Allocates blocks for requests and frees them again.

    With the prefix cache, full blocks whose keys and values are computed can be found by their content: a chain of hashes over the tokens
    up to the block's end. A freed block stays findable until it is given out again. Whoever calls `computed` answers for it that the step
    which computes the tokens has succeeded; a step that reads found blocks is enqueued behind it. Blocks behind the window of a sliding
    group are freed when the request grows, and the row gets the null block in their places."""

    def __init__(self, config: RunnerConfig, num_blocks: int, windows: Sequence[int | None] = (None,)) -> None:
        self._size = config.block_size
        self._cached = config.prefix_cache
        self._windows = tuple(windows)
        self._ahead = _AHEAD if all(window is None for window in windows) else 0
        self.pools = tuple(BlockPool(count) for count in group_blocks(config, windows, num_blocks))
        self._held: dict[str, _Held] = {}
        self._changed: dict[str, None] = {}  # requests whose rows the runner has not been told

    @property
    def num_free(self) -> int:
        """Blocks that each group can still give out."""
        return min(pool.num_free for pool in self.pools)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks, in each group, for so many tokens."""
        return max(0, -(-num_tokens // self._size) - request.num_blocks)

    def find_prefix(self, request: Request) -> int:
        """Tokens at the front of a waiting request whose blocks are in the cache; at least one token is left to compute."""
        if not self._cached or request.sampling.prompt_logprobs is not None:  # those come from computing the prompt
            return 0
        keys = self._keys(request, (request.num_tokens - 1) // self._size)
        count = len(keys)
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is None:
                count = next((i for i, key in enumerate(keys[:count]) if pool.find(key) is None), count)
        sliding = [(pool, window) for pool, window in zip(self.pools, self._windows, strict=True) if window is not None]
        while count and not all(self._has_window(pool, keys, count, window) for pool, window in sliding):
            count -= 1
        return count * self._size

    def start(self, request: Request, prefix: int, num_tokens: int) -> BlockIds | None:
        """The rows of a request that enters with `prefix` tokens from `find_prefix`, for `num_tokens` tokens; None when blocks lack."""
        count = prefix // self._size
        missing = -(-num_tokens // self._size) - count
        firsts = [first_block(prefix, window, self._size) for window in self._windows]
        found = [[pool.find(key) for key in request.block_keys[first:count]] for pool, first in zip(self.pools, firsts, strict=True)]
        rows: list[list[int]] = []
        shared = [[block for block in blocks if block is not None] for blocks in found]
        if any(p.num_free - sum(map(p.is_free, blocks)) < missing for p, blocks in zip(self.pools, shared, strict=True)):
            return None
        for pool, first, blocks in zip(self.pools, firsts, shared, strict=True):
            for block in blocks:
                pool.share(block)
            rows.append([NULL_BLOCK] * first + blocks + (pool.allocate(missing) or []))
        request.num_blocks = count + missing
        self._held[request.request_id] = _Held(tuple(rows), firsts, request.num_blocks, list(firsts), num_kept=count)
        return tuple(map(tuple, rows))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Blocks for a request up to `num_tokens` tokens; False, and none, when they lack. Those behind a window are freed before.

        While blocks are plenty some more come along: telling the runner of a block costs the host more than all else of a decode."""
        missing = self.num_missing(request, num_tokens)
        if not missing:
            return True
        held = self._held[request.request_id]
        self._changed[request.request_id] = None
        for group, (pool, window) in enumerate(zip(self.pools, self._windows, strict=True)):
            first, old, row = first_block(request.num_computed_tokens, window, self._size), held.num_null[group], held.rows[group]
            if first > old:
                # Steps in flight may still read them; whoever gets them next is enqueued behind those steps.
                pool.free(row[old:first])
                row[old:first] = [NULL_BLOCK] * (first - old)
                held.num_null[group] = first
        free = self.num_free
        if free < missing:
            return False
        ahead = min(self._ahead, -(-request.max_total_tokens // self._size) - request.num_blocks - missing)
        if ahead > 0 and free - missing - ahead >= _PLENTY * len(self._held):
            missing += ahead
        for pool, row in zip(self.pools, held.rows, strict=True):
            row.extend(pool.allocate(missing) or ())
        request.num_blocks += missing
        return True

    def take_changes(self) -> list[tuple[str, BlockIds, tuple[int, ...]]]:
        """For each request that grew since the last call: its new blocks by group, and by group how many of its first entries have become
        the null block, () when no group changed there."""
        changes = []
        for request_id in self._changed:
            held = self._held[request_id]
            nulls = () if held.num_null == held.nulls_told else tuple(held.num_null)
            changes.append((request_id, tuple(tuple(row[held.num_told :]) for row in held.rows), nulls))
            held.num_told, held.nulls_told = len(held.rows[0]), list(held.num_null)
        self._changed.clear()
        return changes

    def computed(self, request: Request, num_tokens: int) -> None:
        """Keys and values of the first `num_tokens` tokens are in the cache: let the full blocks be found."""
        held = self._held[request.request_id]
        count = num_tokens // self._size
        if not self._cached or count <= held.num_kept:
            return
        keys = self._keys(request, count)
        for pool, row in zip(self.pools, held.rows, strict=True):
            for index in range(held.num_kept, count):
                if row[index] != NULL_BLOCK:
                    pool.keep(row[index], keys[index])
        held.num_kept = count

    def free(self, request: Request) -> None:
        """Give back everything that a request owns."""
        held = self._held.pop(request.request_id, None)
        self._changed.pop(request.request_id, None)
        request.num_blocks = 0
        if held is not None:
            # Steps in flight may still write to these blocks; whoever gets them next is enqueued behind those steps.
            for pool, row, first in zip(self.pools, held.rows, held.num_null, strict=True):
                pool.free(row[first:])

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: what blocks hold is no longer what their tokens would give."""
        for pool in self.pools:
            pool.forget_all()

    def _has_window(self, pool: BlockPool, keys: Sequence[bytes], count: int, window: int) -> bool:
        return all(pool.find(key) is not None for key in keys[first_block(count * self._size, window, self._size) : count])

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """The keys of the first full blocks; the request keeps them, its known tokens never change."""
        keys, size = request.block_keys, self._size
        if len(keys) < count:
            tokens = request.known_tokens(len(keys) * size, count * size)
            for start in range(0, len(tokens), size):
                content = array("q", tokens[start : start + size]).tobytes()
                keys.append(blake2b(content, digest_size=_KEY_BYTES, key=keys[-1] if keys else b"").digest())
        return keys[:count]
