"""The step operations in plain torch: the CPU path, and the oracle of every faster twin."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from rung.attention import PAD_SLOT
from rung.runner.ops.base import StepOps
from rung.runner.ops.torch_decode import TorchDecodeOps
from rung.runner.ops.torch_sample import TorchSampleOps

if TYPE_CHECKING:
    from rung.runner.slots import RequestSlots


class TorchStepOps(StepOps):
    """Vectorised over rows; each row finds its request by a search in `query_start_loc`."""

    name: ClassVar[str] = "torch"
    decode = TorchDecodeOps()
    sampling = TorchSampleOps()

    def scatter(self, target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        target.view(-1).index_copy_(0, index, values)

    def positions_and_lengths(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        num_rows: int,
    ) -> None:
        computed = torch.where(idx_mapping >= 0, num_computed_tokens[idx_mapping.clamp(min=0)], 0)  # [R]
        torch.add(computed, query_start_loc.diff(), out=seq_lens)
        seq_lens.mul_(query_start_loc.diff() > 0)
        rows, request, real = _rows(query_start_loc, num_rows)
        within = rows - query_start_loc[request]
        positions[:num_rows] = torch.where(real, computed[request] + within, 0)

    def prefill_ids(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        prefill_len: torch.Tensor,
        all_token_ids: torch.Tensor,
        input_ids: torch.Tensor,
        num_rows: int,
    ) -> None:
        slot, real = _row_slots(idx_mapping, query_start_loc, num_rows)
        position = positions[:num_rows]
        known = real & (position < prefill_len[slot])
        tokens = all_token_ids[slot, position.clamp(max=all_token_ids.shape[1] - 1)]
        input_ids[:num_rows] = torch.where(known, tokens, input_ids[:num_rows])

    def last_sampled_ids(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        prefill_len: torch.Tensor,
        last_sampled_tokens: torch.Tensor,
        input_ids: torch.Tensor,
        num_rows: int,
    ) -> None:
        slot, real = _row_slots(idx_mapping, query_start_loc, num_rows)
        decoded = positions[:num_rows] >= prefill_len[slot]
        current = input_ids[:num_rows]
        input_ids[:num_rows] = torch.where(real, torch.where(decoded, last_sampled_tokens[slot, 0].to(torch.int32), current), 0)

    def logits_indices(self, query_start_loc: torch.Tensor, num_requests: int) -> torch.Tensor:
        return (query_start_loc[1 : num_requests + 1].to(torch.int64) - 1).clamp_(min=0)

    def gather_block_table(
        self, idx_mapping: torch.Tensor, table: torch.Tensor, num_blocks: torch.Tensor, out: torch.Tensor, num_rows: int
    ) -> None:
        slot = idx_mapping[:num_rows].clamp(min=0)
        used = torch.where(idx_mapping[:num_rows] >= 0, num_blocks[slot], 0)
        columns = torch.arange(table.shape[1], device=table.device)
        out[:num_rows] = torch.where(columns < used.unsqueeze(1), table[slot], 0)

    def slot_mapping(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        block_size: int,
        out: torch.Tensor,
        num_rows: int,
    ) -> None:
        slot, real = _row_slots(idx_mapping, query_start_loc, num_rows)
        position = positions[:num_rows]
        block = table[slot, (position // block_size).clamp(max=table.shape[1] - 1)].to(torch.int64)
        out[:num_rows] = torch.where(real, block * block_size + position % block_size, PAD_SLOT)
        out[num_rows:] = PAD_SLOT

    def num_sampled(self, idx_mapping: torch.Tensor, seq_lens: torch.Tensor, prefill_len: torch.Tensor, num_requests: int) -> torch.Tensor:
        idx = idx_mapping[:num_requests]
        return ((idx >= 0) & (seq_lens[:num_requests] >= prefill_len[idx.clamp(min=0)])).to(torch.int32)

    def advance(
        self,
        slots: RequestSlots,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        # Rows that must not be written go to the spare row behind the last slot: no host decision, and no race with a real slot.
        num_requests = sampled.shape[0]
        spare = slots.max_num_requests
        idx = idx_mapping[:num_requests]
        query_lens = query_start_loc[: num_requests + 1].diff()
        slots.num_computed_tokens_storage.index_add_(0, torch.where(idx >= 0, idx, spare), query_lens)

        wanted = (idx >= 0) & (num_sampled > 0)
        row = torch.where(wanted, idx, spare)
        slots.last_sampled_storage[row, 0] = sampled
        column = slots.total_len_storage[row].to(torch.int64)
        fits = column < slots.max_model_len
        ids = slots.all_token_ids_storage
        ids[torch.where(fits, row, spare), column.clamp(max=slots.max_model_len - 1)] = sampled.to(ids.dtype)
        slots.total_len_storage.index_add_(0, row, wanted.to(torch.int32))

    def apply_bitmask(self, logits: torch.Tensor, bits: torch.Tensor, bits_rows: torch.Tensor) -> None:
        bit = torch.arange(32, device=bits.device, dtype=torch.int32)
        allowed = ((bits.unsqueeze(2) >> bit) & 1).flatten(1)[:, : logits.shape[1]].bool()  # [masks, vocab]
        forbidden = ~allowed[bits_rows.clamp(min=0)] & (bits_rows >= 0).unsqueeze(1)
        logits.masked_fill_(forbidden, -torch.inf)


def _rows(query_start_loc: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row numbers, the batch row of each one's request, and whether the row belongs to a request at all; [num_rows] each."""
    rows = torch.arange(num_rows, device=query_start_loc.device, dtype=torch.int32)
    ends = query_start_loc[1:]
    request = torch.searchsorted(ends, rows, right=True).clamp_(max=ends.shape[0] - 1)
    return rows, request, rows < query_start_loc[-1]


def _row_slots(idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each row (0 where there is none) and whether it has one; [num_rows] each."""
    _, request, real = _rows(query_start_loc, num_rows)
    slot = idx_mapping[request]
    return slot.clamp(min=0), real & (slot >= 0)
