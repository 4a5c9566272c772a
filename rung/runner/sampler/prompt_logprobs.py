"""Log-probabilities of the prompts that a step computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rung.runner.batch import Batch
from rung.runner.sampler.logprobs import LogprobRows, LogprobTensors, StepLogprobs
from rung.runner.sampler.sampler import Sampler
from rung.runner.slots import RequestSlots

_CHUNK = 64  # positions whose logits exist at a time


class PromptLogprobs:
    """A step that computes tokens of a prompt gives the log-probabilities of the tokens that follow them, up to the prompt's last one.

    Only positions that a step computes have any, so a prompt must not start from cached blocks. A prompt in chunks comes in parts, and one
    that is computed again after a preemption comes again."""

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor], slots: RequestSlots, sampler: Sampler) -> None:
        self._compute_logits = compute_logits
        self._slots = slots
        self._sampler = sampler

    def collect(
        self,
        batch: Batch,
        *,
        hidden: torch.Tensor | None = None,  # [tokens, hidden], of the whole batch
        logits: torch.Tensor | None = None,  # [rows, vocab], instead of it when every request has one token
    ) -> tuple[StepLogprobs, ...]:
        """Enqueue them for the requests of the batch that asked."""
        found = []
        for row, num_top in self._sampler.prompt_logprobs(batch):
            slot = int(batch.idx_mapping[row])
            first, length = int(batch.query_start_loc[row]), int(batch.query_lens[row])
            start = int(batch.seq_lens[row]) - length  # position of the first computed token
            count = min(length, int(self._slots.prompt_len_np[slot]) - 1 - start)
            if count <= 0:
                continue
            targets = self._slots.all_token_ids[slot, start + 1 : start + 1 + count].to(torch.int64)
            if hidden is not None:
                parts = [
                    self._sampler.logprobs_of(
                        self._compute_logits(hidden[first + at : first + min(at + _CHUNK, count)]), targets[at : at + _CHUNK], num_top
                    )
                    for at in range(0, count, _CHUNK)
                ]
            else:
                assert logits is not None
                parts = [self._sampler.logprobs_of(logits[row : row + 1], targets, num_top)]
            rows = LogprobRows(batch.request_ids[row], 0, count, num_top, start + 1)
            found.append(StepLogprobs(LogprobTensors.cat(parts), (rows,)))
        return tuple(found)
