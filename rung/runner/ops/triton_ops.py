"""The step operations in Triton: one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from rung.attention import PAD_SLOT
from rung.launch import TritonLauncher
from rung.runner.ops.base import StepOps
from rung.runner.ops.triton_decode import TritonDecodeOps
from rung.runner.ops.triton_sample import TritonSampleOps

if TYPE_CHECKING:
    from rung.runner.slots import RequestSlots

_KERNELS = "rung.runner.ops.triton_step_kernels"  # named, not imported: it needs Triton, which a warm start does without
SCATTER = TritonLauncher(_KERNELS, "scatter_kernel")
POSITIONS_AND_LENGTHS = TritonLauncher(_KERNELS, "positions_and_lengths_kernel")
PREFILL_IDS = TritonLauncher(_KERNELS, "prefill_ids_kernel")
LAST_SAMPLED_IDS = TritonLauncher(_KERNELS, "last_sampled_ids_kernel")
LOGITS_INDICES = TritonLauncher(_KERNELS, "logits_indices_kernel")
GATHER_BLOCK_TABLE = TritonLauncher(_KERNELS, "gather_block_table_kernel")
SLOT_MAPPING = TritonLauncher(_KERNELS, "slot_mapping_kernel")
NUM_SAMPLED = TritonLauncher(_KERNELS, "num_sampled_kernel")
ADVANCE = TritonLauncher(_KERNELS, "advance_kernel")
APPLY_BITMASK = TritonLauncher("rung.runner.ops.triton_bitmask_kernels", "bitmask_kernel")

_WORDS = 32  # words of a grammar mask a program
_BLOCK = 128  # rows a program; also columns, where rows are wide
_BLOCK_OF_ANY_ROW = 2048  # tokens that a filter reads at once, where the number of rows must not decide it


def _grid(count: int) -> tuple[int, int, int]:
    return -(-count // _BLOCK), 1, 1


class TritonStepOps(StepOps):
    """Equal to `TorchStepOps` in every value, except that rows which must not be written are skipped instead of sent to a spare row.

    A kernel compiles, or is loaded, at its first call, so whoever captures an operation calls it once before."""

    name: ClassVar[str] = "triton"
    has_kernels: ClassVar[bool] = True
    decode = TritonDecodeOps()
    sampling = TritonSampleOps()

    def __init__(self, *, batch_invariant: bool = False) -> None:
        if batch_invariant:  # the tiles of a row decide in which order its probabilities are summed
            self.sampling = TritonSampleOps(block=_BLOCK_OF_ANY_ROW, num_warps=8)

    def scatter(self, target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        assert target.is_contiguous()
        count = index.shape[0]
        SCATTER.run(_grid(count), target, index, values, count, BLOCK=_BLOCK)

    def positions_and_lengths(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        num_rows: int,
    ) -> None:
        num_slots = idx_mapping.shape[0]
        POSITIONS_AND_LENGTHS.run(
            _grid(max(num_rows, num_slots)),
            idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens, num_rows, num_slots,
            SEARCH_STEPS=num_slots.bit_length(), BLOCK=_BLOCK,
        )  # fmt: skip

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
        num_slots = idx_mapping.shape[0]
        PREFILL_IDS.run(
            _grid(num_rows),
            idx_mapping, query_start_loc, positions, prefill_len, all_token_ids, input_ids, num_rows, num_slots, all_token_ids.stride(0),
            SEARCH_STEPS=num_slots.bit_length(), BLOCK=_BLOCK,
        )  # fmt: skip

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
        num_slots = idx_mapping.shape[0]
        LAST_SAMPLED_IDS.run(
            _grid(num_rows),
            idx_mapping, query_start_loc, positions, prefill_len, last_sampled_tokens, input_ids, num_rows, num_slots,
            SEARCH_STEPS=num_slots.bit_length(), BLOCK=_BLOCK,
        )  # fmt: skip

    def logits_indices(self, query_start_loc: torch.Tensor, num_requests: int) -> torch.Tensor:
        out = torch.empty(num_requests, dtype=torch.int64, device=query_start_loc.device)
        LOGITS_INDICES.run(_grid(num_requests), query_start_loc, out, num_requests, BLOCK=_BLOCK)
        return out

    def gather_block_table(
        self, idx_mapping: torch.Tensor, table: torch.Tensor, num_blocks: torch.Tensor, out: torch.Tensor, num_rows: int
    ) -> None:
        max_blocks = table.shape[1]
        GATHER_BLOCK_TABLE.run(
            (num_rows, _grid(max_blocks)[0], 1),
            idx_mapping, table, num_blocks, out, max_blocks, table.stride(0), num_blocks.stride(0), out.stride(0), BLOCK=_BLOCK,
        )  # fmt: skip

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
        num_slots, size = idx_mapping.shape[0], out.shape[0]
        SLOT_MAPPING.run(
            _grid(size),
            idx_mapping, query_start_loc, positions, table, out, num_rows, num_slots, size, table.shape[1], table.stride(0),
            BLOCK_SIZE=block_size, PAD=PAD_SLOT, SEARCH_STEPS=num_slots.bit_length(), BLOCK=_BLOCK,
        )  # fmt: skip

    def num_sampled(self, idx_mapping: torch.Tensor, seq_lens: torch.Tensor, prefill_len: torch.Tensor, num_requests: int) -> torch.Tensor:
        out = torch.empty(num_requests, dtype=torch.int32, device=idx_mapping.device)
        NUM_SAMPLED.run(_grid(num_requests), idx_mapping, seq_lens, prefill_len, out, num_requests, BLOCK=_BLOCK)
        return out

    def advance(
        self,
        slots: RequestSlots,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        num_requests, ids = sampled.shape[0], slots.all_token_ids_storage
        ADVANCE.run(
            _grid(num_requests),
            idx_mapping, query_start_loc, sampled, num_sampled,
            slots.num_computed_tokens_storage, slots.total_len_storage, slots.last_sampled_storage, ids,
            num_requests, slots.max_model_len, ids.stride(0), BLOCK=_BLOCK,
        )  # fmt: skip

    def apply_bitmask(self, logits: torch.Tensor, bits: torch.Tensor, bits_rows: torch.Tensor) -> None:
        rows, vocab = logits.shape
        assert logits.stride(1) == bits.stride(1) == 1
        APPLY_BITMASK.run(
            (rows, -(-vocab // (_WORDS * 32)), 1),
            logits, bits, bits_rows, vocab, logits.stride(0), bits.stride(0), WORDS=_WORDS,
        )  # fmt: skip
