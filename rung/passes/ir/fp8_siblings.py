"""Products of the same e4m3 rows by e4m3 weights that lie apart, with one scale an output. x_scale: [1], or [num_rows, 1]."""

from __future__ import annotations

from typing import Any

import torch

from rung.passes.ir.activation import gelu_mul, silu_mul
from rung.passes.ir.fp8 import quant_per_token_body, quant_rows_body
from rung.passes.ir.fp8_linear import TOLERANCE, fp8_linear_body
from rung.passes.ir.op import Provider, define_ir_op
from rung.passes.kernels import fp8_siblings

_GATES = {"silu": silu_mul, "gelu": gelu_mul}
Scale = torch.Tensor | None


def fp8_linear_gated_body(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    activation: str,
    out_scale: Scale,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    halves = (fp8_linear_body(x, x_scale, weight, scale, None, dtype) for weight, scale in ((gate, gate_scale), (up, up_scale)))
    return quant_rows_body(_GATES[activation](*halves), out_scale)


def fp8_linear_three_body(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    first: torch.Tensor,
    first_scale: torch.Tensor,
    second: torch.Tensor,
    second_scale: torch.Tensor,
    third: torch.Tensor,
    third_scale: torch.Tensor,
    first_bias: Scale,
    second_bias: Scale,
    third_bias: Scale,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        fp8_linear_body(x, x_scale, first, first_scale, first_bias, dtype),
        fp8_linear_body(x, x_scale, second, second_scale, second_bias, dtype),
        fp8_linear_body(x, x_scale, third, third_scale, third_bias, dtype),
    )


def _rows(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return quant_per_token_body(torch.randn(rows, 320, device=device))


def _weight(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = quant_per_token_body(torch.randn(n, 320, device=device) * 320**-0.5)
    return values, scale.squeeze(1)


def _three_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    sizes = 192, 64, 80
    weights = (part for n in sizes for part in _weight(n, device))
    return *_rows(rows, device), *weights, *(torch.randn(n, device=device).to(dtype) for n in sizes), dtype


def _gated_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    out_scale = torch.full((1,), 0.02, device=device)
    return *_rows(rows, device), *_weight(192, device), *_weight(192, device), "silu", out_scale, dtype


FP8_LINEAR_GATED = define_ir_op(
    "fp8_linear_gated(Tensor x, Tensor x_scale, Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, str activation, "
    "Tensor? out_scale, ScalarType dtype) -> (Tensor, Tensor)",
    fp8_linear_gated_body,
    (Provider("triton", fp8_siblings.why_not_gated, fp8_siblings.gated, fp8_siblings.describe_gated),),
    tolerance=TOLERANCE,
    sample=_gated_sample,
)
FP8_LINEAR_THREE = define_ir_op(
    "fp8_linear_three(Tensor x, Tensor x_scale, Tensor first, Tensor first_scale, Tensor second, Tensor second_scale, Tensor third, "
    "Tensor third_scale, Tensor? first_bias, Tensor? second_bias, Tensor? third_bias, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    fp8_linear_three_body,
    (Provider("triton", fp8_siblings.why_not_three, fp8_siblings.three, fp8_siblings.describe_three),),
    tolerance=TOLERANCE,
    sample=_three_sample,
)
