"""The model's input buffers: fixed addresses that captured graphs read, filled on the device each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rung.runner.batch import Batch
from rung.runner.block_table import BlockTable
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
    from_host: torch.Tensor  # uint8, the memory of idx_mapping and behind it query_start_loc, which one copy fills

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
        start, end = _layout(max_num_requests)
        from_host = torch.zeros(end, dtype=torch.uint8, device=device)
        return cls(
            input_ids=input_ids,
            positions=positions,
            query_start_loc=from_host[start:].view(torch.int32),
            seq_lens=torch.zeros(max_num_requests, dtype=torch.int32, device=device),
            idx_mapping=from_host[: 8 * max_num_requests].view(torch.int64).fill_(-1),
            from_host=from_host,
        )


def _layout(max_num_requests: int) -> tuple[int, int]:
    """Where `query_start_loc` begins behind `idx_mapping`, aligned as kernels have it of any tensor, and ends; in bytes."""
    start = -(-8 * max_num_requests // 16) * 16
    return start, start + 4 * (max_num_requests + 1)


class InputBuilder:
    """Fills the input buffers. `idx_mapping` and `query_start_loc` come from the host, in one copy; the rest is gathered from the slots."""

    def __init__(self, buffers: InputBuffers, slots: RequestSlots, transfer: HostToDevice, ops: StepOps) -> None:
        self.buffers = buffers
        self._slots = slots
        self._transfer = transfer
        self._ops = ops
        self._rows = buffers.idx_mapping.shape[0]
        self._start, self._end = _layout(self._rows)
        self._every_row = np.arange(buffers.query_start_loc.shape[0], dtype=np.int32)
        self._uploaded: npt.NDArray[np.int64] | None = None  # of the decodes on the device; a repeated batch has the same array

    @property
    def has_kernels(self) -> bool:
        """Whether `build` and `build_decodes` are launches of our kernels alone."""
        return self._ops.has_kernels

    def upload(self, batch: Batch) -> None:
        """Enqueue what comes from the host."""
        self._copy(batch.idx_mapping, batch.query_start_loc, batch.num_tokens)
        self._uploaded = None

    def upload_decodes(self, batch: Batch) -> None:
        """Enqueue them for a step of one token each, unless the last one had the same batch. Rows behind the batch are requests without a
        slot, so that every row of a graph belongs to one."""
        if batch.idx_mapping is self._uploaded:
            return
        self._copy(batch.idx_mapping, self._every_row, 0)
        self._uploaded = batch.idx_mapping

    def _copy(self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int32], rest: int) -> None:
        """Enqueue both in one copy: no slot behind `slots`, and `rest` behind `starts`."""
        # A fresh host array each step: the copy of an earlier step may still read its own.
        packed = np.empty(self._end, np.uint8)
        idx_mapping, query_start_loc = packed[: 8 * self._rows].view(np.int64), packed[self._start :].view(np.int32)
        idx_mapping[len(slots) :] = -1
        idx_mapping[: len(slots)] = slots
        query_start_loc[len(starts) :] = rest
        query_start_loc[: len(starts)] = starts
        self._transfer.copy_into(packed, self.buffers.from_host)

    def forget(self) -> None:
        """Requests came or went: the next batch is uploaded."""
        self._uploaded = None

    def build_decodes(self, tables: Iterable[BlockTable], num_rows: int) -> None:
        """Enqueue all inputs of the uploaded decodes, block tables and slot mappings too, as a decode graph does: `num_rows` of them, each
        one token."""
        for table in tables:
            self._ops.decode.inputs(self._slots, table, self.buffers, num_rows)

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
