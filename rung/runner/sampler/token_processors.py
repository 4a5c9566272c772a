"""Lists of tokens that a request allows, forbids for a while, or favours."""

from __future__ import annotations

import torch

from rung.runner.ops.base import StepOps
from rung.runner.sampler.params import SamplingParams
from rung.runner.sampler.processor import Entry, Processor, Rows, forbid
from rung.runner.sampler.slot_lists import SlotLists
from rung.runner.transfer import HostToDevice


class AllowedTokens(Processor):
    """Everything but a request's `allowed_token_ids` becomes -inf."""

    def __init__(self, max_num_requests: int, transfer: HostToDevice, ops: StepOps) -> None:
        self._ids = SlotLists(max_num_requests, torch.int64, -1, transfer, ops)

    def wants(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def add(self, entry: Entry) -> None:
        self._ids.set(entry.slot, sorted(entry.params.allowed_token_ids or ()))

    def apply_staged_writes(self) -> None:
        self._ids.apply_staged_writes()

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        ids, vocab = self._ids.table[rows.slots], logits.shape[1]  # [rows, n]
        places = ids.clamp(0, vocab - 1)
        kept = torch.where((ids >= 0) & (ids < vocab), logits.gather(1, places), -torch.inf)
        logits.masked_fill_(ids[:, :1] >= 0, -torch.inf)
        logits.scatter_reduce_(1, places, kept, "amax")


class MinTokens(Processor):
    """Tokens that would end a request are -inf until it has `min_tokens` tokens of output."""

    def __init__(self, max_num_requests: int, transfer: HostToDevice, ops: StepOps) -> None:
        self._ids = SlotLists(max_num_requests, torch.int64, -1, transfer, ops)
        self._counts = SlotLists(max_num_requests, torch.int64, 0, transfer, ops)

    def wants(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def add(self, entry: Entry) -> None:
        count = entry.params.min_tokens
        self._ids.set(entry.slot, sorted(entry.stop_token_ids) if count else ())
        self._counts.set(entry.slot, [count] if count else ())

    def apply_staged_writes(self) -> None:
        self._ids.apply_staged_writes()
        self._counts.apply_staged_writes()

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        if self._ids.width:
            short = rows.output_lens < self._counts.table[rows.slots, 0]
            forbid(logits, self._ids.table[rows.slots], short.unsqueeze(1))


class LogitBias(Processor):
    """A request's `logit_bias` is added."""

    def __init__(self, max_num_requests: int, transfer: HostToDevice, ops: StepOps) -> None:
        self._ids = SlotLists(max_num_requests, torch.int64, -1, transfer, ops)
        self._values = SlotLists(max_num_requests, torch.float32, 0, transfer, ops)

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def add(self, entry: Entry) -> None:
        bias = entry.params.logit_bias
        self._ids.set(entry.slot, list(bias))
        self._values.set(entry.slot, list(bias.values()))

    def apply_staged_writes(self) -> None:
        self._ids.apply_staged_writes()
        self._values.apply_staged_writes()

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        ids, vocab = self._ids.table[rows.slots], logits.shape[1]  # [rows, n]
        # Each id comes once in a row; padding adds 0 to some token.
        values = torch.where((ids >= 0) & (ids < vocab), self._values.table[rows.slots], 0)
        logits.scatter_add_(1, ids.clamp(0, vocab - 1), values)
