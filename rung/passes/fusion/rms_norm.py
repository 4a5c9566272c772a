"""A norm written in plain torch becomes the IR op.

The fp32 variant finds more than fp32 models: a norm that is multiplied before it is rounded, as Gemma's
`(normed * (1 + weight)).to(dtype)`, is this one between two conversions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rung.passes.ir import rms_norm as rms_norm_op
from rung.passes.pattern import Draw, Match, Pattern, each_dtype, same_size
from rung.passes.pattern_pass import PatternPass


def _search(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _example(draw: Draw) -> Mapping[str, Any]:
    hidden = draw.size(8)
    return {"x": draw.tensor("x", 3, hidden), "weight": draw.tensor("weight", hidden), "epsilon": draw.float(1e-6, 1e-3)}


def _precondition(match: Match) -> str | None:
    if match["weight"].dim() != 1 or not same_size(match["weight"].shape[0], match["x"].shape[-1]):
        return f"the weight has shape {tuple(match['weight'].shape)}, not one value for each of the last dimension"
    return None


RMS_NORM = Pattern(
    name="rms_norm",
    search=_search,
    replacement=rms_norm_op,
    precondition=_precondition,
    example=_example,
    variants=(*each_dtype("x", "weight"), {"x": torch.bfloat16, "weight": torch.float32}, {"x": torch.float16, "weight": torch.float32}),
    shared=("convert_element_type",),
)


def rms_norm() -> PatternPass:
    return PatternPass("rms_norm", (RMS_NORM,))
