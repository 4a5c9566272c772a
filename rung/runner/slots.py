"""The persistent batch: one row, the slot, for each running request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rung.errors import InternalError
from rung.runner.ops.base import StepOps
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice

_PREFILL_LEN, _NUM_COMPUTED, _TOTAL_LEN = range(3)


class RequestSlots:
    """Slots of `max_num_requests` rows, taken from the end of a free list, last freed first taken.

    The tensors stay on the device between steps and are written by staged writes (requests come and go) and by `StepOps.advance` (each
    step). The numpy mirrors are what the host knows without asking: exact here, an upper bound once drafts can be rejected. Each tensor
    has one spare row behind the last slot that takes the writes of padding."""

    def __init__(self, max_num_requests: int, max_model_len: int, transfer: HostToDevice, ops: StepOps) -> None:
        self.max_num_requests = max_num_requests
        self.max_model_len = max_model_len
        self.slot_of: dict[str, int] = {}
        self.free_slots = list(range(max_num_requests))

        self.prompt_len_np = np.zeros(max_num_requests, np.int32)
        self.prefill_len_np = np.zeros(max_num_requests, np.int32)
        self.num_computed_tokens_np = np.zeros(max_num_requests, np.int32)
        self.total_len_np = np.zeros(max_num_requests, np.int32)

        rows, device = max_num_requests + 1, transfer.device
        self.all_token_ids_storage = torch.zeros(rows, max_model_len, dtype=torch.int32, device=device)
        self.last_sampled_storage = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        lengths = torch.zeros(3, rows, dtype=torch.int32, device=device)
        self.num_computed_tokens_storage = lengths[_NUM_COMPUTED]
        self.total_len_storage = lengths[_TOTAL_LEN]
        # Views are made once: making one costs as much as a small operation.
        self.all_token_ids = self.all_token_ids_storage[:-1]  # int32 [R, L]
        self.last_sampled_tokens = self.last_sampled_storage[:-1]  # int64 [R, 1]
        self.prefill_len = lengths[_PREFILL_LEN, :-1]  # int32 [R]
        self.num_computed_tokens = lengths[_NUM_COMPUTED, :-1]  # int32 [R]
        self.total_len = lengths[_TOTAL_LEN, :-1]  # int32 [R]
        self._staged_ids = StagedWrites(self.all_token_ids_storage, transfer, ops)
        self._staged_lengths = StagedWrites(lengths, transfer, ops)

    def add(self, request_id: str, token_ids: Sequence[int], prompt_len: int, num_computed_tokens: int = 0) -> int:
        """Give the request a slot. `token_ids` is its prompt, or after a preemption its prompt and output so far."""
        if not self.free_slots:
            raise InternalError(f"no free slots: all {self.max_num_requests} are taken when request {request_id!r} comes")
        assert request_id not in self.slot_of
        assert len(token_ids) >= prompt_len
        slot = self.free_slots.pop()
        self.slot_of[request_id] = slot
        self.prompt_len_np[slot] = prompt_len
        self._staged_ids.stage(slot, 0, token_ids)
        self._set_lengths(slot, prefill_len=len(token_ids), num_computed_tokens=num_computed_tokens)
        return slot

    def restart(self, slot: int, num_computed_tokens: int) -> None:
        """Recompute a request from `num_computed_tokens` on: all tokens it has so far become its prefill."""
        self._set_lengths(slot, prefill_len=int(self.total_len_np[slot]), num_computed_tokens=num_computed_tokens)

    def remove(self, request_id: str) -> int:
        """Free the slot of a finished or preempted request."""
        slot = self.slot_of.pop(request_id)
        self.free_slots.append(slot)
        return slot

    def apply_staged_writes(self) -> None:
        self._staged_ids.apply()
        self._staged_lengths.apply()

    def _set_lengths(self, slot: int, *, prefill_len: int, num_computed_tokens: int) -> None:
        self.prefill_len_np[slot] = prefill_len
        self.total_len_np[slot] = prefill_len
        self.num_computed_tokens_np[slot] = num_computed_tokens
        self._staged_lengths.stage(_PREFILL_LEN, slot, [prefill_len])
        self._staged_lengths.stage(_TOTAL_LEN, slot, [prefill_len])
        self._staged_lengths.stage(_NUM_COMPUTED, slot, [num_computed_tokens])
