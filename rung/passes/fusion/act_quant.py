"""A gated activation and the quantisation of its result to e4m3 become one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rung.passes.fused_ops import ACT_QUANT, GELU_MUL, SILU_MUL
from rung.passes.fusion.quantisations import KINDS, QuantPass
from rung.passes.ir import GELU_AND_MUL, SILU_AND_MUL, IROp
from rung.passes.pattern import Draw, Pattern, always, each_dtype


def _pattern(activation: IROp, kind: str) -> Pattern:
    tensors = ("gate", "up") if activation in (SILU_MUL, GELU_MUL) else ("x",)
    extra = {"static": ("scale",), "group": ("group",)}.get(kind, ())
    search, replacement = _functions(activation.overload, KINDS[kind], ACT_QUANT[activation.name, kind].overload, (*tensors, *extra))

    def example(draw: Draw) -> Mapping[str, Any]:
        width = 4 * draw.size(4)
        made: dict[str, Any] = {name: draw.tensor(name, 3, width * (3 - len(tensors))) for name in tensors}
        if kind == "static":
            made["scale"] = draw.tensor("scale", 1).abs() + 1e-2
        elif kind == "group":
            made["group"] = width // 4
        return made

    variants = each_dtype(*tensors, dtypes=(torch.bfloat16, torch.float16, torch.float32))
    if kind == "static":
        variants = tuple({**variant, "scale": torch.float32} for variant in variants)
    return Pattern(
        name=f"{activation.name}_quant" + ("" if kind == "token" else f"_{kind}"),
        search=search,
        replacement=replacement,
        precondition=always,
        example=example,
        variants=variants,
    )


def _functions(
    activation: Callable[..., Any], quantise: Callable[..., Any], fused: Callable[..., Any], names: tuple[str, ...]
) -> tuple[Callable[..., Any], ...]:
    count = 2 if "up" in names else 1

    def search(**given: Any) -> Any:
        values = [given[name] for name in names]
        return quantise(activation(*values[:count]), *values[count:])

    def replacement(**given: Any) -> Any:
        return fused(*(given[name] for name in names))

    return search, replacement


def act_quant() -> QuantPass:
    activations = (SILU_AND_MUL, GELU_AND_MUL, SILU_MUL, GELU_MUL)
    pairs = {(activation.overload, KINDS[kind]): _pattern(activation, kind) for activation in activations for kind in KINDS}
    return QuantPass("act_quant", pairs)
