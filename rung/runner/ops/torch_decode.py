"""The operations of a decode graph in plain torch: the oracle of the Triton twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rung.attention import PAD_SLOT
from rung.runner.ops.decode_base import DecodeOps, DecodeState, RowSampling
from rung.runner.sampler.failures import mark_failures
from rung.runner.sampler.noise import gumbel_noise

if TYPE_CHECKING:
    from rung.runner.block_table import BlockTable
    from rung.runner.inputs import InputBuffers
    from rung.runner.slots import RequestSlots


class TorchDecodeOps(DecodeOps):
    def inputs(self, slots: RequestSlots, table: BlockTable, buffers: InputBuffers, num_rows: int) -> None:
        idx = buffers.idx_mapping[:num_rows]
        valid, slot = idx >= 0, idx.clamp(min=0)
        computed = torch.where(valid, slots.num_computed_tokens[slot], 0)  # int32 [rows]
        scheduled = buffers.query_start_loc[: num_rows + 1].diff() > 0
        buffers.seq_lens[:num_rows] = torch.where(scheduled, computed + 1, 0)
        buffers.positions[:num_rows] = computed
        known = slots.all_token_ids[slot, computed.clamp(max=slots.max_model_len - 1).to(torch.int64)]
        decoded = slots.last_sampled_tokens[slot, 0].to(torch.int32)
        ids = torch.where(computed < slots.prefill_len[slot], known, decoded)
        buffers.input_ids[:num_rows] = torch.where(valid, ids, 0)

        columns = torch.arange(table.max_blocks, device=idx.device, dtype=torch.int32)
        used = valid.unsqueeze(1) & (columns < table.num_blocks[slot].unsqueeze(1))
        table.batch[:num_rows] = torch.where(used, table.table[slot], 0)
        column = (computed // table.block_size).clamp(max=table.max_blocks - 1).to(torch.int64)
        block = table.table[slot, column].to(torch.int64)
        table.slot_mapping[:num_rows] = torch.where(valid, block * table.block_size + computed % table.block_size, PAD_SLOT)

    def pick(
        self, scores: torch.Tensor, idx_mapping: torch.Tensor, seq_lens: torch.Tensor, sampling: RowSampling, any_random: bool
    ) -> torch.Tensor:
        if any_random:
            slot = idx_mapping.clamp(min=0)
            temperature = torch.where(idx_mapping >= 0, sampling.temperature[slot], 0).unsqueeze(1)  # [rows, 1]
            scores = scores.float()
            noise = gumbel_noise(sampling.seed[slot], seq_lens.to(torch.int64), scores.shape[1])
            scores = torch.where(temperature > 0, scores / torch.where(temperature > 0, temperature, 1) + noise, scores)
        return mark_failures(scores, scores.argmax(dim=-1))

    def sample(self, logits: torch.Tensor, slots: RequestSlots, buffers: InputBuffers, sampling: RowSampling, state: DecodeState) -> None:
        rows = logits.shape[0]
        idx, seq_lens = buffers.idx_mapping[:rows], buffers.seq_lens[:rows]
        slot = idx.clamp(min=0)
        marked = self.pick(logits, idx, seq_lens, sampling, any_random=True)  # int64 [rows]
        token = marked.clamp(min=0)

        state.step.add_(1)
        enabled = state.enabled > 0
        valid = (idx >= 0) & enabled
        wanted = valid & (seq_lens >= slots.prefill_len[slot])
        recorded = torch.where(wanted, marked, -1)
        # The row's number stays on the device.
        place = (state.step % state.history.shape[0]).expand(rows), torch.arange(rows, device=idx.device)
        state.history[place] = torch.where(enabled, recorded, state.history[place])

        spare = slots.max_num_requests
        query = buffers.query_start_loc[: rows + 1].diff()
        slots.num_computed_tokens_storage.index_add_(0, torch.where(valid, idx, spare), torch.where(valid, query, 0))
        row = torch.where(wanted, idx, spare)
        slots.last_sampled_storage[row, 0] = token
        column = slots.total_len_storage[row].to(torch.int64)
        fits = column < slots.max_model_len
        ids = slots.all_token_ids_storage
        ids[torch.where(fits, row, spare), column.clamp(max=slots.max_model_len - 1)] = token.to(ids.dtype)
        slots.total_len_storage.index_add_(0, row, wanted.to(torch.int32))
        stopped = wanted & ((sampling.stop_ids[slot] == token.unsqueeze(1)).any(dim=1) | (marked < 0))
        buffers.idx_mapping[:rows] = torch.where(stopped, -1, idx)
