"""Products by e4m3 weights, and what stands around them in a decoder layer.

A weight is e4m3 [n, k] with float32 scales: [n], one for each output, or [n / 128, k / 128], one for each square of 128. `input_scale`
([1]) makes the quantisation of activations static; without it they get a scale for each row, or for each `group` of a row where that is
not 0. A provider may leave activations as they are where rows are few: the bytes of the weights bound it then, and rounding less is no
loss. So `tolerance` is that of rounding to e4m3. Where a residual tells the dtype of the results, x may be e4m3 already: it is
x / `input_scale` then, as attention writes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.ir.fp8 import E4M3, GROUP, quant_group_body, quant_per_token_body, quant_rows_body, quant_static_body
from rung.passes.ir.linear import ACTIVATIONS
from rung.passes.ir.op import Provider, define_ir_op
from rung.passes.ir.rms_norm import rms_norm_body
from rung.passes.kernels import fp8, fp8_norm, invariant

Scale = torch.Tensor | None


def dequantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A weight [n, k] in float32."""
    wide = values.float()
    if scale.dim() == 1:
        return wide * scale.unsqueeze(1)
    squares = wide.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [n / 128, 128, k / 128, 128]
    result: torch.Tensor = (squares * scale[:, None, :, None]).flatten(0, 1).flatten(1, 2)
    return result


def scaled_rows(x: torch.Tensor, x_scale: Scale) -> torch.Tensor:
    """Activations [..., k] in float32."""
    wide: torch.Tensor = x.float()
    if x_scale is not None and x_scale.dim() == x.dim() and x_scale.shape[-1] > 1:
        wide = (wide.unflatten(-1, (x_scale.shape[-1], -1)) * x_scale.unsqueeze(-1)).flatten(-2)
        return wide
    return wide if x_scale is None else wide * x_scale


def fp8_linear_body(
    x: torch.Tensor,
    x_scale: Scale,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: Scale,
    dtype: torch.dtype,
    invariant: bool = False,
) -> torch.Tensor:
    added = None if bias is None else bias.float()
    return F.linear(scaled_rows(x, x_scale), dequantised(weight, weight_scale), added).to(dtype)


def fp8_quant_linear_body(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: Scale, bias: Scale, activation: str, group: int
) -> torch.Tensor:
    scale = input_scale
    if scale is not None:
        values = quant_static_body(x, scale)
    else:
        values, scale = quant_group_body(x, group) if group else quant_per_token_body(x)
    result: torch.Tensor = ACTIVATIONS[activation](fp8_linear_body(values, scale, weight, weight_scale, bias, x.dtype))
    return result


def fp8_norm_linear_body(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: Scale,
    bias: Scale,
    activation: str,
    group: int,
) -> torch.Tensor:
    normed = rms_norm_body(x, norm_weight, epsilon)
    return fp8_quant_linear_body(normed, weight, weight_scale, input_scale, bias, activation, group)


def fp8_linear_norm_linear_body(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: Scale,
    bias: Scale,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    next_weight: torch.Tensor,
    next_weight_scale: torch.Tensor,
    next_input_scale: Scale,
    next_bias: Scale,
    activation: str,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype == E4M3:
        hidden = fp8_linear_body(x, input_scale, weight, weight_scale, bias, residual.dtype) + residual
    else:
        hidden = fp8_quant_linear_body(x, weight, weight_scale, input_scale, bias, "", group) + residual
    following = next_weight, next_weight_scale, next_input_scale, next_bias, activation, group
    return fp8_norm_linear_body(hidden, norm_weight, epsilon, *following), hidden


def fp8_linear_norm_body(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: Scale,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    out_scale: Scale,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = fp8_linear_body(x, x_scale, weight, weight_scale, bias, residual.dtype) + residual
    return *quant_rows_body(rms_norm_body(hidden, norm_weight, epsilon), out_scale), hidden


def fp8_block_body(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = fp8.halves(args)
    middle, residual = fp8_linear_norm_linear_body(x, *first)
    return fp8_linear_norm_linear_body(middle, *fp8.with_residual(second, residual))


def _sample(rows: int, dtype: torch.dtype, device: torch.device, *, k: int = 320, n: int = 192) -> dict[str, Any]:
    def weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        values, scale = quant_per_token_body(torch.randn(shape, device=device) * shape[1] ** -0.5)
        return values, scale.squeeze(1), None

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return {
        "x": make(rows, k),
        "o": (*weight(n, k), make(n)),
        "norm": (make(n), 1e-5),
        "residual": make(rows, n),
        "gate_up": (*weight(2 * k, n), make(2 * k)),
        "down": (*weight(n, k), make(n)),
        "qkv": (*weight(320, n), None),
    }


def _linear_norm_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    rows_of_x = quant_per_token_body(made["x"])
    return *rows_of_x, *made["o"][:2], made["o"][3], made["residual"], *made["norm"], torch.full((1,), 0.02, device=device)


def _explicit_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return *quant_per_token_body(made["x"]), *made["o"][:2], made["o"][3], dtype


def _quant_linear_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return made["residual"], *made["gate_up"], "silu", 0


def _norm_linear_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return made["residual"], *made["norm"], *made["gate_up"], "gelu", 0


def _linear_norm_linear_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return made["x"], *made["o"], made["residual"], *made["norm"], *made["gate_up"], "silu", 0


def _block_sample(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    made = _sample(rows, dtype, device)
    return *_linear_norm_linear_sample(rows, dtype, device)[:-1], *made["down"], *made["norm"], *made["qkv"], "", 0


# e4m3 rounds to 1 in 16 of a value at most, 2.6e-2 in the mean; a block does so twice on its way.
TOLERANCE = {torch.bfloat16: 6e-2}
_WEIGHT = "Tensor {0}weight, Tensor {0}weight_scale, Tensor? {0}input_scale, Tensor? {0}bias"
_JOINED = f"Tensor x, {_WEIGHT.format('')}, Tensor residual, Tensor norm_weight, float epsilon, {_WEIGHT.format('next_')}, str activation"

FP8_LINEAR = define_ir_op(
    "fp8_linear(Tensor x, Tensor? x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType dtype, bool invariant=False)"
    " -> Tensor",
    fp8_linear_body,
    (
        Provider(
            "batch_invariant",
            invariant.why_not_fp8_linear,
            partial(invariant.fp8_linear, scaled_rows, dequantised),
            invariant.describe_fp8,
            gradients=True,
        ),
        Provider("scaled_mm", fp8.why_not_linear, fp8.linear, fp8.describe_linear),
    ),
    tolerance=TOLERANCE,
    sample=_explicit_sample,
)
FP8_QUANT_LINEAR = define_ir_op(
    f"fp8_quant_linear(Tensor x, {_WEIGHT.format('')}, str activation, int group) -> Tensor",
    fp8_quant_linear_body,
    (Provider("triton", fp8.why_not_quant_linear, fp8.quant_linear, fp8.describe_quant_linear),),
    tolerance=TOLERANCE,
    sample=_quant_linear_sample,
)
FP8_NORM_LINEAR = define_ir_op(
    f"fp8_norm_linear(Tensor x, Tensor norm_weight, float epsilon, {_WEIGHT.format('')}, str activation, int group) -> Tensor",
    fp8_norm_linear_body,
    (Provider("triton", fp8.why_not_norm_linear, fp8.norm_linear, fp8.describe_norm_linear),),
    tolerance=TOLERANCE,
    sample=_norm_linear_sample,
)
FP8_LINEAR_NORM = define_ir_op(
    "fp8_linear_norm(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor residual, Tensor norm_weight, "
    "float epsilon, Tensor? out_scale) -> (Tensor, Tensor, Tensor)",
    fp8_linear_norm_body,
    (Provider("triton", fp8_norm.why_not, fp8_norm.linear_norm, fp8_norm.describe),),
    tolerance=TOLERANCE,
    sample=_linear_norm_sample,
)
FP8_LINEAR_NORM_LINEAR = define_ir_op(
    f"fp8_linear_norm_linear({_JOINED}, int group) -> (Tensor, Tensor)",
    fp8_linear_norm_linear_body,
    (Provider("triton", fp8.why_not_linear_norm_linear, fp8.linear_norm_linear, fp8.describe_linear_norm_linear),),
    tolerance=TOLERANCE,
    sample=_linear_norm_linear_sample,
)
FP8_BLOCK = define_ir_op(
    f"fp8_block({_JOINED}, {_WEIGHT.format('down_')}, Tensor last_norm_weight, float last_epsilon, {_WEIGHT.format('last_')}, "
    "str last_activation, int group) -> (Tensor, Tensor)",
    fp8_block_body,
    (Provider("triton", fp8.why_not_block, fp8.block, fp8.describe_block),),
    tolerance=TOLERANCE,
    sample=_block_sample,
)


def fp8_linear(
    x: torch.Tensor, x_scale: Scale, weight: torch.Tensor, weight_scale: torch.Tensor, bias: Scale, dtype: torch.dtype
) -> torch.Tensor:
    """x [num_rows, k] e4m3 with scales ([1], [num_rows, 1] or [num_rows, k / 128]), or of any floating point dtype without, times
    weight.T -> [num_rows, n] in `dtype`."""
    result: torch.Tensor = torch.ops.rung.fp8_linear(x, x_scale, weight, weight_scale, bias, dtype)
    return result
