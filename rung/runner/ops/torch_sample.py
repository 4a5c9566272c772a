"""The sampler's operations over rows of logits in plain torch: the oracle of the Triton twin."""

from __future__ import annotations

import torch

from rung.runner.ops.sample_base import RowFilters, SampleOps
from rung.runner.sampler.filters import min_p_, truncate
from rung.runner.sampler.logprobs import LogprobTensors, gather_logprobs


class TorchSampleOps(SampleOps):
    """Sorts whole rows."""

    def filter(self, scores: torch.Tensor, idx_mapping: torch.Tensor, filters: RowFilters) -> torch.Tensor:
        slots = idx_mapping.clamp(min=0)
        temperature = filters.temperature[slots]  # [rows]
        filtered = temperature > 0
        scores = scores.float()
        scaled = scores / torch.where(filtered, temperature, 1).unsqueeze(1)
        min_p_(scaled, torch.where(filtered, filters.log_min_p[slots], -torch.inf))
        scaled = truncate(scaled, torch.where(filtered, filters.top_k[slots], 0), torch.where(filtered, filters.top_p[slots], 1))
        return scores.masked_fill(scaled == -torch.inf, -torch.inf)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        return gather_logprobs(logits, token_ids, num_top)
