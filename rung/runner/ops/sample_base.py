"""The device operations of the sampler that read whole rows of logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from rung.runner.sampler.logprobs import LogprobTensors


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Parameters by slot. A slot whose temperature is 0 has no filters."""

    temperature: torch.Tensor  # float32 [R]
    log_min_p: torch.Tensor  # float32 [R], -inf: no min-p
    top_k: torch.Tensor  # int64 [R], 0: all
    top_p: torch.Tensor  # float32 [R], 1: all


class SampleOps(ABC):
    """The rules of `StepOps` hold: nothing waits, nothing is read on the host. A row does not depend on the others."""

    @abstractmethod
    def filter(self, scores: torch.Tensor, idx_mapping: torch.Tensor, filters: RowFilters) -> torch.Tensor:
        """Scores [rows, vocab] in float32, with -inf at the tokens that min-p, top-k and top-p drop, each of what the last one left, at
        the temperature of the row's slot (`idx_mapping` int64 [rows]). The kept scores stay as they were, without the temperature.

        Of equal scores those with lower ids are kept. The mass of a token is exp(score - best) in units of 2 ** -44, a whole number, so
        that sums are exact in any order; top-p keeps the tokens before whom less than ceil(top_p x the sum of masses) lies. NaN stays."""

    @abstractmethod
    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """Of logits [N, vocab]: log-softmax in float32 at `token_ids` int64 [N] and at the `num_top` best, equal ones by id."""

    def rehearsal(self, max_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of rows up to `max_rows`, and of most likely tokens, that together take every kernel of these operations."""
        return (), ()
