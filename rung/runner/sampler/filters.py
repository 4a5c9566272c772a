"""Filters on the distribution at a temperature: min-p, top-k, top-p."""

from __future__ import annotations

import torch

MASS_UNITS = 2.0**44  # of the best token; the sum over a vocabulary of 2 ** 18 fits in 64 bits


def min_p_(logits: torch.Tensor, log_min_p: torch.Tensor) -> None:
    """Mask, in place, tokens less likely than exp(`log_min_p`) [rows] times the best one. Logits float32 [rows, vocab]."""
    threshold = logits.amax(dim=-1) + log_min_p  # -inf without a min-p
    logits.masked_fill_(logits < threshold.unsqueeze(1), -torch.inf)


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the top-k tokens and of those all but the most likely ones that together reach top-p; the best token always stays."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[1]
    rank = torch.arange(vocab, device=logits.device)
    limit = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    values = values.masked_fill(rank >= limit, -torch.inf)
    # Sums of integers are exact, so that they do not depend on how a device adds, which changes with the number of rows.
    weight = torch.where(values == values[:, :1], 1.0, (values - values[:, :1]).exp())  # the best may be infinite
    mass = (weight * MASS_UNITS).to(torch.int64)
    before = mass.cumsum(dim=-1) - mass  # of the more likely tokens
    needed = (top_p.double() * mass.sum(dim=-1).double()).ceil().to(torch.int64).clamp(min=1)
    # A row without top-p keeps all, also those whose mass is less than a unit.
    drop = (before >= needed.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    drop[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, values.masked_fill(drop, -torch.inf))
