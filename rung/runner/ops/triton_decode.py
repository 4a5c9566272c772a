"""The operations of a decode graph in Triton: one launch for the inputs, two for sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rung.attention import PAD_SLOT
from rung.launch import TritonLauncher
from rung.passes.kernels.support import is_programmatic
from rung.runner.ops.decode_base import MAX_STOP_IDS, DecodeOps, DecodeState, RowSampling
from rung.runner.ops.triton_sample import power_of_two

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTiles:
    """How a row of logits is cut into programs: each takes `steps` blocks of so many tokens, one behind the other."""

    block: int
    steps: int
    num_warps: int

    @property
    def tokens(self) -> int:
        return self.steps * self.block


# The largest number of rows and its tiles, as measured on an H200 (docs/performance.md). Few rows want many programs, many rows many loads
# on their way in each; noise is bound by its arithmetic and wants neither.
_TILES = (
    (16, ChunkTiles(block=1024, steps=1, num_warps=4)),
    (64, ChunkTiles(block=2048, steps=4, num_warps=8)),
    (2**31, ChunkTiles(block=1024, steps=8, num_warps=4)),
)


class TritonDecodeOps(DecodeOps):
    """Equal to `TorchDecodeOps`, but for the last bits of the noise's logarithms. `tiles` and `programmatic` (launches that may start while
    their predecessor runs) are chosen where they are not given."""

    def __init__(self, *, tiles: ChunkTiles | None = None, programmatic: bool | None = None) -> None:
        self._tiles, self.programmatic = tiles, programmatic

    def rehearsal(self, max_rows: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(min(most, max_rows) for most, _ in _TILES))

    def tiles(self, rows: int) -> ChunkTiles:
        return self._tiles or next(tiles for most, tiles in _TILES if rows <= most)

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
        tiles, launch = self.tiles(rows), self._launch(scores)
        values, tokens = _best_of_chunks(scores, tiles)
        num_chunks = values.shape[1]
        out = torch.empty(rows, dtype=torch.int64, device=scores.device)
        PICK_CHUNK.run(
            (rows, num_chunks, 1),
            scores, idx_mapping, seq_lens, sampling.temperature, sampling.seed, values, tokens, vocab, scores.stride(0), num_chunks,
            STEPS=tiles.steps, BLOCK=tiles.block, num_warps=tiles.num_warps, **launch,
        )  # fmt: skip
        PICK_ROW.run((rows, 1, 1), values, tokens, out, num_chunks, CHUNKS=power_of_two(num_chunks), num_warps=1, **launch)
        return out

    def sample(self, logits: torch.Tensor, slots: RequestSlots, buffers: InputBuffers, sampling: RowSampling, state: DecodeState) -> None:
        rows, vocab = logits.shape
        tiles, launch = self.tiles(rows), self._launch(logits)
        values, tokens = _best_of_chunks(logits, tiles)
        num_chunks = values.shape[1]
        SAMPLE_CHUNK.run(
            (rows, num_chunks, 1),
            logits, buffers.idx_mapping, buffers.seq_lens, sampling.temperature, sampling.seed, state.step, values, tokens,
            vocab, logits.stride(0), num_chunks, STEPS=tiles.steps, BLOCK=tiles.block, num_warps=tiles.num_warps, **launch,
        )  # fmt: skip
        SAMPLE_ROW.run(
            (rows, 1, 1),
            values, tokens, buffers.idx_mapping, buffers.query_start_loc, buffers.seq_lens, slots.prefill_len, sampling.stop_ids,
            state.enabled, state.step, state.history,
            slots.num_computed_tokens_storage, slots.total_len_storage, slots.last_sampled_storage, slots.all_token_ids_storage,
            num_chunks, state.history.shape[0], state.history.stride(0), slots.max_model_len, slots.all_token_ids_storage.stride(0),
            CHUNKS=power_of_two(num_chunks), STOPS=MAX_STOP_IDS, num_warps=1, **launch,
        )  # fmt: skip

    def _launch(self, scores: torch.Tensor) -> dict[str, bool]:
        programmatic = is_programmatic(scores) if self.programmatic is None else self.programmatic
        return {"PROGRAMMATIC": programmatic, "launch_pdl": programmatic}


def _best_of_chunks(scores: torch.Tensor, tiles: ChunkTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the best score (float32) and its token (int32) of each chunk of a row, [rows, chunks] each."""
    assert scores.stride(1) == 1
    shape = scores.shape[0], -(-scores.shape[1] // tiles.tokens)
    return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)
