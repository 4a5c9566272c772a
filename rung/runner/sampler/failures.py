"""Rows that cannot be sampled: they are marked where their token would be, and other rows go on."""

from __future__ import annotations

import torch

NAN_TOKEN = -2
NOTHING_ALLOWED_TOKEN = -3

MESSAGES = {
    NAN_TOKEN: "the model's logits contain NaN",
    NOTHING_ALLOWED_TOKEN: "no token may be sampled: the grammar and the sampling parameters forbid all of them, or every logit is -inf",
}


def mark_failures(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The best tokens [rows] of scores [rows, vocab], or a mark. A NaN is larger than everything to argmax, so a look at the best score
    suffices."""
    best = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return torch.where(best.isnan(), NAN_TOKEN, torch.where(best == -torch.inf, NOTHING_ALLOWED_TOKEN, tokens))


def mark_hidden_nans(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The same for logits [rows, vocab] whose NaN may have been masked before `tokens` were found."""
    return torch.where(logits.amax(dim=-1).isnan(), NAN_TOKEN, tokens)
