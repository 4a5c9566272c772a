"""A norm and the quantisation of its result to e4m3 become one op, with one pass over the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rung.passes.fused_ops import RMS_NORM_QUANT
from rung.passes.fusion.quantisations import KINDS, QuantPass
from rung.passes.ir import RMS_NORM, rms_norm
from rung.passes.pattern import Draw, Pattern, always, each_dtype


def _pattern(kind: str) -> Pattern:
    quantise, fused, extra = KINDS[kind], RMS_NORM_QUANT[kind].overload, {"static": ("scale",), "group": ("group",)}.get(kind, ())
    search, replacement = _functions(quantise, fused, extra)

    def example(draw: Draw) -> Mapping[str, Any]:
        hidden = 4 * draw.size(4)
        made = {"x": draw.tensor("x", 3, hidden), "weight": draw.tensor("weight", hidden), "epsilon": draw.float(1e-6, 1e-3)}
        if kind == "static":
            made["scale"] = draw.tensor("scale", 1).abs() + 1e-2
        elif kind == "group":
            made["group"] = hidden // 4
        return made

    variants = each_dtype("x", "weight", dtypes=(torch.bfloat16, torch.float16, torch.float32))
    if kind == "static":
        variants = tuple({**variant, "scale": torch.float32} for variant in variants)
    return Pattern(
        name="norm_quant" + ("" if kind == "token" else f"_{kind}"),
        search=search,
        replacement=replacement,
        precondition=always,
        example=example,
        variants=variants,
    )


def _functions(quantise: Callable[..., Any], fused: Callable[..., Any], extra: tuple[str, ...]) -> tuple[Callable[..., Any], ...]:
    def search(x: torch.Tensor, weight: torch.Tensor, epsilon: float, **more: Any) -> Any:
        return quantise(rms_norm(x, weight, epsilon), *(more[name] for name in extra))

    def replacement(x: torch.Tensor, weight: torch.Tensor, epsilon: float, **more: Any) -> Any:
        return fused(x, weight, epsilon, *(more[name] for name in extra))

    return search, replacement


def norm_quant() -> QuantPass:
    return QuantPass("norm_quant", {(RMS_NORM.overload, quantise): _pattern(kind) for kind, quantise in KINDS.items()})
