"""IR ops that fusions put in place of several operations. All are functional and computed as the operations that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rung.passes.ir import FP8_QUANT_GROUP, FP8_QUANT_PER_TOKEN, FP8_QUANT_STATIC, GELU_AND_MUL, RMS_NORM, SILU_AND_MUL, IROp, define_ir_op
from rung.passes.ir.activation import gelu_mul, silu_mul


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return RMS_NORM.body(total, weight, epsilon), total


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


def _qk_norm_rope(
    query: torch.Tensor,  # [..., num_heads, head_size]
    key: torch.Tensor,  # [..., num_kv_heads, head_size]
    query_weight: torch.Tensor,  # [head_size]
    key_weight: torch.Tensor,
    cos: torch.Tensor,  # [..., head_size]
    sin: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = RMS_NORM.body(query, query_weight, epsilon), RMS_NORM.body(key, key_weight, epsilon)
    return _rotate(normed[0], cos, sin), _rotate(normed[1], cos, sin)


FUSED_ADD_RMS_NORM = define_ir_op(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)", _add_rms_norm
)
SILU_MUL = define_ir_op("silu_mul(Tensor gate, Tensor up) -> Tensor", silu_mul)
GELU_MUL = define_ir_op("gelu_mul(Tensor gate, Tensor up) -> Tensor", gelu_mul)
QK_NORM_ROPE = define_ir_op(
    "qk_norm_rope(Tensor query, Tensor key, Tensor query_weight, Tensor key_weight, Tensor cos, Tensor sin, float epsilon)"
    " -> (Tensor, Tensor)",
    _qk_norm_rope,
)


def _quantised(op: IROp, arguments: str, count: int) -> dict[str, IROp]:
    """`op`, whose arguments these are, and each quantisation of its result as one op: by kind of the quantisation."""
    kinds = {
        "token": (FP8_QUANT_PER_TOKEN, "", "(Tensor, Tensor)"),
        "static": (FP8_QUANT_STATIC, ", Tensor scale", "Tensor"),
        "group": (FP8_QUANT_GROUP, ", int group", "(Tensor, Tensor)"),
    }

    def body(quantise: IROp) -> Callable[..., Any]:
        return lambda *args: quantise.body(op.body(*args[:count]), *args[count:])

    return {
        kind: define_ir_op(f"{op.name}_quant_{kind}({arguments}{more}) -> {result}", body(quantise))
        for kind, (quantise, more, result) in kinds.items()
    }


RMS_NORM_QUANT = _quantised(RMS_NORM, "Tensor x, Tensor weight, float epsilon", 3)
ACT_QUANT: dict[tuple[str, str], IROp] = {
    (op.name, kind): made
    for op, arguments, count in (
        (SILU_AND_MUL, "Tensor x", 1),
        (GELU_AND_MUL, "Tensor x", 1),
        (SILU_MUL, "Tensor gate, Tensor up", 2),
        (GELU_MUL, "Tensor gate, Tensor up", 2),
    )
    for kind, made in _quantised(op, arguments, count).items()
}

FUSED_OPS: tuple[IROp, ...] = (
    *(FUSED_ADD_RMS_NORM, SILU_MUL, GELU_MUL, QK_NORM_ROPE),
    *RMS_NORM_QUANT.values(),
    *ACT_QUANT.values(),
)
