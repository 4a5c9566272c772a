"""Filters on the distribution at a temperature: min-p, top-k, top-p."""

from __future__ import annotations

import torch

_SCALE = 2.0**52  # of masses as integers: a float32 is scaled exactly, and the sum of a distribution fits in 64 bits


def min_p_(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Mask, in place, tokens whose probability is below `min_p` [rows] times that of the best one. Logits float32 [rows, vocab]."""
    threshold = logits.amax(dim=-1) + min_p.log()  # -inf without a min-p
    logits.masked_fill_(logits < threshold.unsqueeze(1), -torch.inf)


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the top-k tokens and of those all but the most likely ones that together reach top-p; the best token always stays."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[1]
    rank = torch.arange(vocab, device=logits.device)
    limit = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    values = values.masked_fill(rank >= limit, -torch.inf)
    # Sums of integers are exact, so that they do not depend on how a device adds, which changes with the number of rows.
    mass = (values.softmax(dim=-1) * _SCALE).to(torch.int64)
    before = mass.cumsum(dim=-1) - mass  # of the more likely tokens
    # A row without top-p keeps all: rounding may bring the mass to 1 before the last token.
    drop = (before >= (top_p * _SCALE).to(torch.int64).unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    drop[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, values.masked_fill(drop, -torch.inf))
