"""The device operations of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from rung.runner.ops.decode_base import DecodeOps
    from rung.runner.ops.sample_base import SampleOps
    from rung.runner.slots import RequestSlots


class StepOps(ABC):
    """Builds a step's inputs from the request slots and writes its results back, all on the device.

    * No operation waits for the device, and none reads a length on the host: `num_rows` and `num_requests` are (padded) extents, the true
      ones are `query_start_loc[-1]` and the entries of `idx_mapping` that are not -1. So a captured call stays right for other batches.
    * All outputs lie in persistent buffers at fixed addresses, owned by the caller.
    * R: request slots, L: maximum length of a request, T: rows of the input buffers, B: maximum blocks of a request.
      `idx_mapping` is int64 [R], the slot of each batch row, -1 for padding; `query_start_loc` is int32 [R + 1], non-decreasing.
    """

    name: ClassVar[str]
    has_kernels: ClassVar[bool] = False  # whether kernels of ours are loaded, and perhaps compiled, at first use

    @property
    @abstractmethod
    def decode(self) -> DecodeOps:
        """The operations of decode graphs, of the same kind."""

    @property
    @abstractmethod
    def sampling(self) -> SampleOps:
        """The operations of the sampler over rows of logits, of the same kind."""

    @abstractmethod
    def scatter(self, target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        """`target.flatten()[index] = values`; the positions (int64 [N]) are unique."""

    @abstractmethod
    def positions_and_lengths(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens: torch.Tensor,  # int32 [R]
        positions: torch.Tensor,  # out, int64 [T]
        seq_lens: torch.Tensor,  # out, int32 [R]
        num_rows: int,
    ) -> None:
        """positions = computed + row within the request (0 in padded rows); seq_lens = computed + query length, 0 behind the batch."""

    @abstractmethod
    def prefill_ids(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        prefill_len: torch.Tensor,  # int32 [R]
        all_token_ids: torch.Tensor,  # int32 [R, L]
        input_ids: torch.Tensor,  # out, int32 [T]
        num_rows: int,
    ) -> None:
        """Copy the known tokens of rows whose position lies within the request's prefill; other rows stay as they are."""

    @abstractmethod
    def last_sampled_ids(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        prefill_len: torch.Tensor,  # int32 [R]
        last_sampled_tokens: torch.Tensor,  # int64 [R, 1]
        input_ids: torch.Tensor,  # out, int32 [T]
        num_rows: int,
    ) -> None:
        """Write the last sampled token into rows past the prefill, and 0 into padded rows."""

    @abstractmethod
    def logits_indices(self, query_start_loc: torch.Tensor, num_requests: int) -> torch.Tensor:
        """int64 [num_requests]: the last row of each request."""

    @abstractmethod
    def gather_block_table(
        self,
        idx_mapping: torch.Tensor,
        table: torch.Tensor,  # int32 [R, B]
        num_blocks: torch.Tensor,  # int32 [R]
        out: torch.Tensor,  # int32 [R, B]
        num_rows: int,
    ) -> None:
        """Rows of the slots in batch order; entries behind a request's blocks and rows without a slot become 0 (the null block)."""

    @abstractmethod
    def slot_mapping(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,  # int32 [R, B]
        block_size: int,
        out: torch.Tensor,  # int64 [T]
        num_rows: int,
    ) -> None:
        """block * block_size + offset of each row; -1 from the true token count to the end of the whole buffer, and without a slot."""

    @abstractmethod
    def num_sampled(self, idx_mapping: torch.Tensor, seq_lens: torch.Tensor, prefill_len: torch.Tensor, num_requests: int) -> torch.Tensor:
        """int32 [num_requests]: 0 while a prompt is only partly computed and for padding, else 1."""

    @abstractmethod
    def advance(
        self,
        slots: RequestSlots,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        sampled: torch.Tensor,  # int64 [num_requests]
        num_sampled: torch.Tensor,  # int32 [num_requests]
    ) -> None:
        """Write a step's results back: last sampled token, token history, lengths, computed tokens. Rows without a slot are skipped."""

    @abstractmethod
    def apply_bitmask(
        self,
        logits: torch.Tensor,  # in and out, float32 [rows, vocab]
        bits: torch.Tensor,  # int32 [masks, ceil(vocab / 32)], bit i of word w stands for token 32 * w + i
        bits_rows: torch.Tensor,  # int32 [rows], the mask of each row
    ) -> None:
        """Set logits whose bit is 0 to -inf. Rows without a mask (-1) are not touched."""
