"""Products of the same rows by weights that lie apart. `activation` as in `linear.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.ir.activation import gelu_mul, silu_mul
from rung.passes.ir.op import Provider, define_ir_op
from rung.passes.kernels import siblings

_GATES = {"silu": silu_mul, "gelu": gelu_mul}
Bias = torch.Tensor | None


def linear_gated_body(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    result: torch.Tensor = _GATES[activation](F.linear(x, gate), F.linear(x, up))
    return result


def linear_three_body(
    x: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor,
    first_bias: Bias,
    second_bias: Bias,
    third_bias: Bias,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return F.linear(x, first, first_bias), F.linear(x, second, second_bias), F.linear(x, third, third_bias)


def _gated_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return *_sample(rows, dtype, device, 320, (192, 192)), "silu"


def _three_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    biases = [torch.randn(n, device=device).to(dtype) for n in (192, 64, 80)]
    return *_sample(rows, dtype, device, 320, (192, 64, 80)), *biases


def _sample(rows: int, dtype: torch.dtype, device: torch.device, k: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    weights = [(torch.randn(n, k, device=device) * k**-0.5).to(dtype) for n in sizes]
    return torch.randn(rows, k, device=device).to(dtype), *weights


_TOLERANCE = {torch.bfloat16: 1e-2}  # a rounding or two of bf16 (4e-3 each) on the way

LINEAR_GATED = define_ir_op(
    "linear_gated(Tensor x, Tensor gate, Tensor up, str activation) -> Tensor",
    linear_gated_body,
    (Provider("triton", siblings.why_not, siblings.gated, siblings.describe_gated),),
    tolerance=_TOLERANCE,
    sample=_gated_sample,
)
LINEAR_THREE = define_ir_op(
    "linear_three(Tensor x, Tensor first, Tensor second, Tensor third, Tensor? first_bias, Tensor? second_bias, Tensor? third_bias)"
    " -> (Tensor, Tensor, Tensor)",
    linear_three_body,
    (Provider("triton", siblings.why_not, siblings.three, siblings.describe_three),),
    tolerance=_TOLERANCE,
    sample=_three_sample,
)
