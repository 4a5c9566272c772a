"""Matrix products and what stands around them in a decoder layer. `activation` is "", "silu" or "gelu" (see `activation.py`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.ir.activation import gelu_body, silu_body
from rung.passes.ir.op import Provider, define_ir_op
from rung.passes.ir.rms_norm import rms_norm_body
from rung.passes.kernels import invariant, projections

ACTIVATIONS = {"": lambda x: x, "silu": silu_body, "gelu": gelu_body}


def linear_body(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, invariant: bool = False) -> torch.Tensor:
    result: torch.Tensor = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return result


def norm_linear_body(
    x: torch.Tensor, norm_weight: torch.Tensor, epsilon: float, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    return linear_body(rms_norm_body(x, norm_weight, epsilon), weight, bias, activation)


def linear_norm_body(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, norm_weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = F.linear(x, weight, bias) + residual
    return rms_norm_body(hidden, norm_weight, epsilon), hidden


def linear_norm_linear_body(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    next_weight: torch.Tensor,
    next_bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, hidden = linear_norm_body(x, weight, bias, residual, norm_weight, epsilon)
    return linear_body(normed, next_weight, next_bias, activation), hidden


def _sample(rows: int, dtype: torch.dtype, device: torch.device, *, k: int = 320, n: int = 192) -> dict[str, Any]:
    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    return {
        "x": make(rows, k),
        "weight": make(n, k, scale=k**-0.5),
        "bias": make(n),
        "residual": make(rows, n),
        "norm_weight": make(n),
        "next_weight": make(2 * k, n, scale=n**-0.5),
        "next_bias": make(2 * k),
    }


def _linear_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return made["x"], made["weight"], made["bias"], "silu"


def _norm_linear_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return made["residual"], made["norm_weight"], 1e-5, made["next_weight"], made["next_bias"], "gelu"


def _linear_norm_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return made["x"], made["weight"], made["bias"], made["residual"], made["norm_weight"], 1e-5


def _linear_norm_linear_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    first = made["x"], made["weight"], made["bias"], made["residual"]
    return *first, made["norm_weight"], 1e-5, made["next_weight"], made["next_bias"], "silu"


_TOLERANCE = {torch.bfloat16: 1e-2}  # a rounding or two of bf16 (4e-3 each) on the way

LINEAR = define_ir_op(
    "linear(Tensor x, Tensor weight, Tensor? bias, str activation, bool invariant=False) -> Tensor",
    linear_body,
    (
        Provider(
            "batch_invariant",
            invariant.why_not_linear,
            partial(invariant.linear, linear_body),
            projections.describe_product,
            gradients=True,
        ),
        Provider("gemv", projections.why_not_linear, projections.linear, projections.describe_product, lambda *args: 1),
        Provider("triton", projections.why_not_linear, projections.linear, projections.describe_product, projections.most_rows_linear),
        Provider("cublas", projections.why_not_linear, projections.cublas, projections.describe_product),
    ),
    tolerance=_TOLERANCE,
    sample=_linear_sample,
)
NORM_LINEAR = define_ir_op(
    "norm_linear(Tensor x, Tensor norm_weight, float epsilon, Tensor weight, Tensor? bias, str activation) -> Tensor",
    norm_linear_body,
    (Provider("triton", projections.why_not, projections.norm_linear, projections.describe_norm_linear),),
    tolerance=_TOLERANCE,
    sample=_norm_linear_sample,
)
LINEAR_NORM = define_ir_op(
    "linear_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight, float epsilon) -> (Tensor, Tensor)",
    linear_norm_body,
    (Provider("triton", projections.why_not, projections.linear_norm, projections.describe_linear_norm),),
    tolerance=_TOLERANCE,
    sample=_linear_norm_sample,
)
LINEAR_NORM_LINEAR = define_ir_op(
    "linear_norm_linear(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight, float epsilon, Tensor next_weight, "
    "Tensor? next_bias, str activation) -> (Tensor, Tensor)",
    linear_norm_linear_body,
    (Provider("triton", projections.why_not, projections.linear_norm_linear, projections.describe_linear_norm_linear),),
    tolerance=_TOLERANCE,
    sample=_linear_norm_linear_sample,
)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "", invariant: bool = False
) -> torch.Tensor:
    """x [num_rows, k] @ weight [n, k].T + bias -> [num_rows, n], or [num_rows, n / 2] with an activation. `invariant`: the bits of a row do
    not depend on the number of rows."""
    result: torch.Tensor = torch.ops.rung.linear(x, weight, bias, activation, invariant)
    return result


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
) -> torch.Tensor:
    """`linear` of `rms_norm(x, norm_weight, epsilon)`."""
    result: torch.Tensor = torch.ops.rung.norm_linear(x, norm_weight, epsilon, weight, bias, activation)
    return result
