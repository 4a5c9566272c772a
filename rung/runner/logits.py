"""From hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rung.passes.invariant import InvariantProducts

Logits = Callable[[torch.Tensor], torch.Tensor]  # hidden [rows, hidden_size] -> logits [rows, vocab]


def logits_of(module: Any, *, batch_invariant: bool) -> Logits:
    """`module.compute_logits`, the bits of whose rows do not depend on the number of rows where `batch_invariant` asks for that."""
    compute: Logits = module.compute_logits
    if not batch_invariant:
        return compute

    def compute_invariant(hidden: torch.Tensor) -> torch.Tensor:
        with InvariantProducts():
            return compute(hidden)

    return compute_invariant
