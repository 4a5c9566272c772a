"""Token sequences that an output must not contain."""

from __future__ import annotations

import torch

from rung.runner.ops.base import StepOps
from rung.runner.sampler.params import SamplingParams
from rung.runner.sampler.processor import Entry, Processor, Rows, forbid
from rung.runner.sampler.slot_lists import SlotLists
from rung.runner.transfer import HostToDevice


class BadWords(Processor):
    """The last token of a sequence is -inf when the tokens before it are the end of the output. The prompt does not count, so a sequence
    may begin in the prompt and end in the output."""

    def __init__(self, token_ids: torch.Tensor, transfer: HostToDevice, ops: StepOps) -> None:
        self._token_ids = token_ids  # int32 [R, L], prompt and output of each slot
        self._transfer = transfer
        self._ops = ops
        self._last = self._lists(-1)  # the last token of each sequence
        self._lens = self._lists(0)  # tokens before it
        self._before: list[SlotLists] = []  # the token `1 + i` places before the last, for each sequence

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.bad_words)

    def add(self, entry: Entry) -> None:
        words = [tuple(word) for word in entry.params.bad_words]
        self._last.set(entry.slot, [word[-1] for word in words])
        self._lens.set(entry.slot, [len(word) - 1 for word in words])
        longest = max(map(len, words), default=1)
        while len(self._before) < longest - 1:
            self._before.append(self._lists(-1))
        for back, column in enumerate(self._before, 2):
            column.set(entry.slot, [word[-back] if back <= len(word) else -1 for word in words])

    def apply_staged_writes(self) -> None:
        for column in (self._last, self._lens, *self._before):
            column.apply_staged_writes()

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        last = self._last.table[rows.slots]  # [rows, words]
        matches = self._lens.table[rows.slots] <= rows.output_lens.unsqueeze(1)
        for back, column in enumerate(self._before, 1):
            if not column.width:
                continue
            wanted = torch.full_like(last, -1)
            wanted[:, : column.width] = column.table[rows.slots]
            place = (rows.seq_lens - back).clamp(0, self._token_ids.shape[1] - 1)
            seen = self._token_ids[rows.slots, place].unsqueeze(1)  # [rows, 1]
            matches &= (wanted == -1) | (wanted == seen)
        forbid(logits, last, matches)

    def _lists(self, fill: int) -> SlotLists:
        return SlotLists(self._token_ids.shape[0], torch.int64, fill, self._transfer, self._ops)
