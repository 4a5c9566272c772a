"""Block tables: which KV-cache blocks each request owns, by slot and in batch order."""

from __future__ import annotations

import numpy as np
import torch

from rung.errors import BlockTableError
from rung.runner.ops.base import StepOps
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice


class BlockTable:
    """The block table of one KV-cache group.

    Two persistent tensors: by slot, written by staged writes, and in batch order, gathered each step. The block count of a request lies in
    front of its row, so that blocks and count travel in one staged write."""

    def __init__(
        self, max_num_requests: int, max_blocks: int, max_num_tokens: int, block_size: int, transfer: HostToDevice, ops: StepOps
    ) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.num_blocks_np = np.zeros(max_num_requests, np.int32)
        self.rows: list[list[int]] = [[] for _ in range(max_num_requests)]  # what the host has written; the null block where it was cleared
        self.owners: dict[int, int] = {}  # how many rows have a block
        self._num_null = [0] * max_num_requests  # entries at the front of each row that were cleared
        device = transfer.device
        by_slot = torch.zeros(max_num_requests, 1 + max_blocks, dtype=torch.int32, device=device)
        self.table = by_slot[:, 1:]  # int32 [R, B]
        self.num_blocks = by_slot[:, 0]  # int32 [R]
        self.batch = torch.zeros(max_num_requests, max_blocks, dtype=torch.int32, device=device)
        self.slot_mapping = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._staged = StagedWrites(by_slot, transfer, ops)
        self._ops = ops
        self._dirty_rows = 0  # rows of `batch` that may not be zero

    def check(self, slot: int | None, num_new_blocks: int, replace: bool) -> None:
        """Raise `BlockTableError` when the row of a request could not take so many more blocks."""
        held = 0 if replace or slot is None else int(self.num_blocks_np[slot])
        if held + num_new_blocks > self.max_blocks:
            raise BlockTableError(
                f"a block table row holds {self.max_blocks} blocks, the request has {held} and the plan adds {num_new_blocks}",
                hint="raise max_model_len, or give the request fewer blocks",
            )

    def write(self, slot: int, block_ids: tuple[int, ...], replace: bool) -> None:
        """Append blocks to the row of a slot, or replace what it holds."""
        self.check(slot, len(block_ids), replace)
        held = 0 if replace else int(self.num_blocks_np[slot])
        self.num_blocks_np[slot] = held + len(block_ids)
        self._staged.stage(slot, 0, [held + len(block_ids)])
        self._staged.stage(slot, 1 + held, block_ids)
        if replace:
            self.release(slot)
        self.rows[slot] += block_ids
        for block in block_ids:
            self.owners[block] = self.owners.get(block, 0) + 1

    def release(self, slot: int) -> None:
        """The request leaves, or gives up its blocks; what the device has of the row is written over by the next one."""
        self._disown(self.rows[slot])
        self.rows[slot], self._num_null[slot] = [], 0

    def clear_front(self, slot: int, count: int) -> None:
        """The first `count` entries of the row become the null block: their blocks were freed, behind a sliding window."""
        done = self._num_null[slot]
        if count > done:
            self._staged.stage(slot, 1 + done, [0] * (count - done))
            self._num_null[slot] = count
            self._disown(self.rows[slot][done:count])
            self.rows[slot][done:count] = [0] * (count - done)

    def _disown(self, blocks: list[int]) -> None:
        for block in blocks:
            left = self.owners.get(block, 0) - 1
            if left > 0:
                self.owners[block] = left
            else:
                self.owners.pop(block, None)

    def apply_staged_writes(self) -> None:
        self._staged.apply()

    def gather(self, idx_mapping: torch.Tensor, num_requests_padded: int) -> torch.Tensor:
        """The rows of the batch, int32 [num_requests_padded, B]: padded rows, and rows that an earlier batch wrote, are zero."""
        self.gather_rows(idx_mapping, self.rows_to_gather(num_requests_padded))
        return self.batch[:num_requests_padded]

    def rows_to_gather(self, num_requests_padded: int) -> int:
        """How many rows a batch writes, those of an earlier batch behind its own too; whoever asks enqueues `gather_rows`."""
        rows = max(num_requests_padded, self._dirty_rows)
        self._dirty_rows = num_requests_padded
        return rows

    def gather_rows(self, idx_mapping: torch.Tensor, num_rows: int) -> None:
        """Enqueue the gather of so many rows into `batch`."""
        self._ops.gather_block_table(idx_mapping, self.table, self.num_blocks, self.batch, num_rows)

    def written(self, num_rows: int) -> None:
        """Somebody else (a decode graph) writes the first rows of `batch`."""
        self._dirty_rows = max(self._dirty_rows, num_rows)

    def map_slots(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, positions: torch.Tensor, num_tokens_padded: int
    ) -> torch.Tensor:
        """The slot mapping, int64 [num_tokens_padded]; the whole buffer behind the true tokens is -1."""
        self._ops.slot_mapping(idx_mapping, query_start_loc, positions, self.table, self.block_size, self.slot_mapping, num_tokens_padded)
        return self.slot_mapping[:num_tokens_padded]
