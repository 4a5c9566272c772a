"""Penalties on tokens that were there already."""

from __future__ import annotations

import torch

from rung.runner.ops.base import StepOps
from rung.runner.sampler.params import SamplingParams
from rung.runner.sampler.processor import Entry, Processor, Rows
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice

_REPETITION, _FREQUENCY, _PRESENCE = range(3)


class Penalties(Processor):
    """Repetition, then frequency, then presence, as in the OpenAI interface and the CTRL paper (Keskar et al., 2019):

    * a logit of a token in prompt or output is divided by the repetition penalty when positive, else multiplied by it;
    * the frequency penalty times the token's count in the output is subtracted; then, if the count is not 0, the presence penalty.

    Counts (int32 [R + 1, vocab]) and which tokens the prompt has (bool, same shape) are allocated when the first request with penalties
    is sampled, counted from the slot's tokens when a request enters, and updated on the device as tokens are sampled."""

    def __init__(self, token_ids: torch.Tensor, transfer: HostToDevice, ops: StepOps) -> None:
        self._token_ids = token_ids  # int32 [R, L], prompt and output of each slot
        rows = token_ids.shape[0]
        self._parameters = torch.tensor([1.0, 0.0, 0.0], device=transfer.device).unsqueeze(1).repeat(1, rows)  # [3, R]
        self._staged = StagedWrites(self._parameters, transfer, ops)
        self.counts: torch.Tensor | None = None  # the spare row behind the last slot takes the counts of padding
        self._in_prompt: torch.Tensor | None = None
        self._uncounted: dict[int, Entry] = {}  # entered and not counted yet

    def wants(self, params: SamplingParams) -> bool:
        return params.has_penalties

    def add(self, entry: Entry) -> None:
        params, slot = entry.params, entry.slot
        if params.has_penalties:
            self._uncounted[slot] = entry
        else:
            self._uncounted.pop(slot, None)
        self._staged.stage(_REPETITION, slot, [params.repetition_penalty])
        self._staged.stage(_FREQUENCY, slot, [params.frequency_penalty])
        self._staged.stage(_PRESENCE, slot, [params.presence_penalty])

    def apply_staged_writes(self) -> None:
        self._staged.apply()

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        counts, in_prompt = self._count_entered(logits.shape[1])
        repetition, frequency, presence = self._parameters[:, rows.slots].unsqueeze(2)  # [rows, 1] each
        count = counts[rows.slots]  # [rows, vocab]
        seen = count > 0
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen | in_prompt[rows.slots], penalised, logits))
        logits.sub_(count * frequency)
        logits.sub_(seen * presence)

    def count(self, idx_mapping: torch.Tensor, tokens: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Count the tokens [rows] that a step has sampled; those of requests without penalties too, which nobody reads."""
        if self.counts is None:
            return
        spare, vocab = self.counts.shape[0] - 1, self.counts.shape[1]
        wanted = (idx_mapping >= 0) & (num_sampled > 0)
        place = torch.where(wanted, idx_mapping, spare) * vocab + tokens
        self.counts.view(-1).index_add_(0, place, wanted.to(torch.int32))

    def _count_entered(self, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.counts is None or self._in_prompt is None:
            rows, device = self._token_ids.shape[0] + 1, self._token_ids.device
            self.counts = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
            self._in_prompt = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
        for slot, entry in self._uncounted.items():
            tokens = self._token_ids[slot, : entry.num_tokens]
            prompt, output = tokens[: entry.prompt_len].long(), tokens[entry.prompt_len :]
            self.counts[slot].zero_().index_add_(0, output, torch.ones_like(output))
            self._in_prompt[slot].zero_().index_fill_(0, prompt, True)
        self._uncounted.clear()
        return self.counts, self._in_prompt
