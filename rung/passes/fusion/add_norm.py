"""A residual sum and the norm behind it become one op that returns both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rung.passes.fused_ops import FUSED_ADD_RMS_NORM
from rung.passes.ir import rms_norm
from rung.passes.pattern import Draw, Match, Pattern, each_dtype, same_size
from rung.passes.pattern_pass import PatternPass


def _search(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, epsilon), total


def _replacement(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    normed, total = FUSED_ADD_RMS_NORM.overload(x, residual, weight, epsilon)
    return normed, total


def _example(draw: Draw) -> Mapping[str, Any]:
    hidden = draw.size(8)
    return {
        "x": draw.tensor("x", 3, hidden),
        "residual": draw.tensor("residual", 3, hidden),
        "weight": draw.tensor("weight", hidden),
        "epsilon": draw.float(1e-6, 1e-3),
    }


def _precondition(match: Match) -> str | None:
    x, residual = match["x"], match["residual"]
    if not same_size(tuple(x.shape), tuple(residual.shape)):
        return f"x has shape {tuple(x.shape)} and the residual {tuple(residual.shape)}"
    return None


ADD_NORM = Pattern(
    name="add_norm",
    search=_search,
    replacement=_replacement,
    precondition=_precondition,
    example=_example,
    variants=each_dtype("x", "residual", "weight"),
)


def add_norm() -> PatternPass:
    return PatternPass("add_norm", (ADD_NORM,))
