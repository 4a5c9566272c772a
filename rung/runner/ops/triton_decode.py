"""The operations of a decode graph in Triton: one launch for the inputs, two for sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rung.attention import PAD_SLOT
from rung.launch import TritonLauncher
from rung.runner.ops.decode_base import MAX_STOP_IDS, DecodeOps, DecodeState, RowSampling

if TYPE_CHECKING:
    from rung.runner.block_table import BlockTable
    from rung.runner.inputs import InputBuffers
    from rung.runner.slots import RequestSlots

_KERNELS = "rung.runner.ops.triton_decode_kernels"  # named, not imported: it needs Triton, which a warm start does without
DECODE_INPUTS = TritonLauncher(_KERNELS, "decode_inputs_kernel")
SAMPLE_CHUNK = TritonLauncher(_KERNELS, "sample_chunk_kernel")
PICK_CHUNK = TritonLauncher(_KERNELS, "pick_chunk_kernel")
PICK_ROW = TritonLauncher(_KERNELS, "pick_row_kernel")
SAMPLE_ROW = TritonLauncher(_KERNELS, "sample_row_kernel")

_BLOCK = 128  # columns of a block table a program
_CHUNK = 2048  # tokens of the vocabulary a program


class TritonDecodeOps(DecodeOps):
    """Equal to `TorchDecodeOps`, but for the last bits of the noise's logarithms."""

    def inputs(self, slots: RequestSlots, table: BlockTable, buffers: InputBuffers, num_rows: int) -> None:
        DECODE_INPUTS.run(
            (num_rows, -(-table.max_blocks // _BLOCK), 1),
            buffers.idx_mapping, buffers.query_start_loc, slots.num_computed_tokens, slots.prefill_len, slots.all_token_ids,
            slots.last_sampled_tokens, table.table, table.num_blocks,
            buffers.input_ids, buffers.positions, buffers.seq_lens, table.batch, table.slot_mapping,
            slots.all_token_ids.stride(0), table.max_blocks, table.table.stride(0), table.num_blocks.stride(0), table.batch.stride(0),
            BLOCK_SIZE=table.block_size, PAD=PAD_SLOT, BLOCK=_BLOCK,
        )  # fmt: skip

    def pick(
        self, scores: torch.Tensor, idx_mapping: torch.Tensor, seq_lens: torch.Tensor, sampling: RowSampling, any_random: bool
    ) -> torch.Tensor:
        rows, vocab = scores.shape
        values, tokens = _best_of_chunks(scores)
        num_chunks = values.shape[1]
        out = torch.empty(rows, dtype=torch.int64, device=scores.device)
        PICK_CHUNK.run(
            (rows, num_chunks, 1),
            scores, idx_mapping, seq_lens, sampling.temperature, sampling.seed, values, tokens,
            vocab, scores.stride(0), num_chunks, CHUNK=_CHUNK,
        )  # fmt: skip
        PICK_ROW.run((rows, 1, 1), values, tokens, out, num_chunks, CHUNKS=1 << (num_chunks - 1).bit_length(), num_warps=1)
        return out

    def sample(self, logits: torch.Tensor, slots: RequestSlots, buffers: InputBuffers, sampling: RowSampling, state: DecodeState) -> None:
        rows, vocab = logits.shape
        values, tokens = _best_of_chunks(logits)
        num_chunks = values.shape[1]
        SAMPLE_CHUNK.run(
            (rows, num_chunks, 1),
            logits, buffers.idx_mapping, buffers.seq_lens, sampling.temperature, sampling.seed, state.step, values, tokens,
            vocab, logits.stride(0), num_chunks, CHUNK=_CHUNK,
        )  # fmt: skip
        SAMPLE_ROW.run(
            (rows, 1, 1),
            values, tokens, buffers.idx_mapping, buffers.query_start_loc, buffers.seq_lens, slots.prefill_len, sampling.stop_ids,
            state.enabled, state.step, state.history,
            slots.num_computed_tokens_storage, slots.total_len_storage, slots.last_sampled_storage, slots.all_token_ids_storage,
            num_chunks, state.history.shape[0], state.history.stride(0), slots.max_model_len, slots.all_token_ids_storage.stride(0),
            CHUNKS=1 << (num_chunks - 1).bit_length(), STOPS=MAX_STOP_IDS, num_warps=1,
        )  # fmt: skip


def _best_of_chunks(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the best score (float32) and its token (int32) of each chunk of a row, [rows, chunks] each."""
    assert scores.stride(1) == 1
    shape = scores.shape[0], -(-scores.shape[1] // _CHUNK)
    return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)
