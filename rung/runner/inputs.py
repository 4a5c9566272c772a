"""The model's input buffers: fixed addresses that captured graphs read, filled on the device each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rung.runner.batch import Batch
from rung.runner.ops.base import StepOps
from rung.runner.slots import RequestSlots
from rung.runner.transfer import HostToDevice


@dataclass(frozen=True, slots=True)
class InputBuffers:
    """Owned by the runner; contents hold until the next step."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    query_start_loc: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R]
    idx_mapping: torch.Tensor  # int64 [R], slots in batch order, -1 behind the batch

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.input_ids, self.positions, self.query_start_loc, self.seq_lens, self.idx_mapping)

    @classmethod
    def allocate(
        cls,
        max_num_tokens: int,
        max_num_requests: int,
        device: torch.device,
        static_inputs: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> InputBuffers:
        """`static_inputs`: input ids and positions that somebody else owns, because graphs read them."""
        if static_inputs is None:
            input_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
            positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        else:
            input_ids, positions = static_inputs
            assert input_ids.shape == positions.shape == (max_num_tokens,)
            assert (input_ids.dtype, positions.dtype) == (torch.int32, torch.int64)
        return cls(
            input_ids=input_ids,
            positions=positions,
            query_start_loc=torch.zeros(max_num_requests + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_num_requests, dtype=torch.int32, device=device),
            idx_mapping=torch.full((max_num_requests,), -1, dtype=torch.int64, device=device),
        )


class InputBuilder:
    """Fills the input buffers. Two arrays come from the host, `idx_mapping` and `query_start_loc`; the rest is gathered from the slots."""

    def __init__(self, buffers: InputBuffers, slots: RequestSlots, transfer: HostToDevice, ops: StepOps) -> None:
        self.buffers = buffers
        self._slots = slots
        self._transfer = transfer
        self._ops = ops
        self._every_row = np.arange(buffers.query_start_loc.shape[0], dtype=np.int32)
        self._uploaded: npt.NDArray[np.int64] | None = None  # of the decodes on the device; a repeated batch has the same array

    @property
    def has_kernels(self) -> bool:
        """Whether `build` is launches of our kernels alone."""
        return self._ops.has_kernels

    def upload(self, batch: Batch) -> None:
        """Enqueue the two host arrays of the step."""
        # Fresh host arrays each step: the copies of an earlier step may still read theirs.
        idx_mapping = np.full(self.buffers.idx_mapping.shape[0], -1, np.int64)
        idx_mapping[: batch.num_requests] = batch.idx_mapping
        query_start_loc = np.full(self.buffers.query_start_loc.shape[0], batch.num_tokens, np.int32)
        query_start_loc[: batch.num_requests + 1] = batch.query_start_loc
        self._transfer.copy_into(idx_mapping, self.buffers.idx_mapping)
        self._transfer.copy_into(query_start_loc, self.buffers.query_start_loc)
        self._uploaded = None

    def upload_decodes(self, batch: Batch) -> None:
        """Enqueue them for a decode graph, unless it had the same batch before. Rows behind the batch are requests without a slot, so that
        every row of the graph belongs to one."""
        if batch.idx_mapping is self._uploaded:
            return
        idx_mapping = np.full(self.buffers.idx_mapping.shape[0], -1, np.int64)
        idx_mapping[: batch.num_requests] = batch.idx_mapping
        self._transfer.copy_into(idx_mapping, self.buffers.idx_mapping)
        self._transfer.copy_into(self._every_row, self.buffers.query_start_loc)
        self._uploaded = batch.idx_mapping

    def forget(self) -> None:
        """Requests came or went: the next batch is uploaded."""
        self._uploaded = None

    def build(self, num_tokens_padded: int, has_prefill: bool) -> None:
        """Enqueue ids, positions and lengths of the uploaded batch."""
        buffers, slots, ops = self.buffers, self._slots, self._ops
        ops.positions_and_lengths(
            buffers.idx_mapping,
            buffers.query_start_loc,
            slots.num_computed_tokens,
            buffers.positions,
            buffers.seq_lens,
            num_tokens_padded,
        )
        layout = (buffers.idx_mapping, buffers.query_start_loc, buffers.positions, slots.prefill_len)
        if has_prefill:
            ops.prefill_ids(*layout, slots.all_token_ids, buffers.input_ids, num_tokens_padded)
        ops.last_sampled_ids(*layout, slots.last_sampled_tokens, buffers.input_ids, num_tokens_padded)
