"""The providers of products by e4m3 weights.

One row: the kernel of `projections`, which reads the weights as e4m3 and leaves activations in bf16. More rows: activations are quantised,
by the kernel that norms them where one does, and e4m3 is multiplied by e4m3: by our kernel while rows are few, else by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.kernels import launches
from rung.passes.kernels.fp8_launches import E4M3, Quantised, add_norm_quantise, quantise
from rung.passes.kernels.fp8_product import (
    Scale,
    Unactivated,
    Weight,
    activated,
    dequantised,
    describe_product,
    given_rows,
    product_of_rows,
    product_tiles,
    takes_quantised,
)
from rung.passes.kernels.launches import Surroundings
from rung.passes.kernels.support import is_programmatic, rows_of, why_not_fp8
from rung.passes.kernels.tiles import Dtypes, tiles_for


def halves(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of the two `linear_norm_linear` that a block is: of the first without x, of the second without x and residual."""
    *most, group = args
    return (*most[:12], group), (*most[12:], group)


def with_residual(args: Sequence[Any], residual: Any) -> tuple[Any, ...]:
    """The arguments of the second half, complete but for x."""
    return (*args[:4], residual, *args[4:])


# --- explicit ------------------------------------------------------------------------------------------------------------------------


def why_not_linear(
    x: torch.Tensor,
    x_scale: Scale,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: Scale,
    dtype: Any,
    invariant: bool = False,
) -> str | None:
    if invariant:
        return "batch invariance was asked for"
    if (reason := why_not_fp8(x, (weight,), bias)) is not None:
        return reason
    if dtype != torch.bfloat16 or x.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return f"{x.dtype} to {dtype}"
    if (x.dtype == torch.bfloat16) != (x_scale is None):
        return f"x is {x.dtype} {'without' if x_scale is None else 'with'} scales"
    return None


def describe_linear(x: torch.Tensor, x_scale: Scale, weight: torch.Tensor, weight_scale: torch.Tensor, bias: Scale, *_: Any) -> str:
    return "weights alone" if x_scale is None else describe_product(weight, weight_scale, bias, "")


def linear(
    x: torch.Tensor,
    x_scale: Scale,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: Scale,
    dtype: Any,
    invariant: bool = False,
) -> torch.Tensor:
    given = Weight(weight, weight_scale, None, bias)
    if x_scale is None:
        tiles = tiles_for(*x.shape[:1], *weight.shape, fp8=Dtypes(weights=True, squares=weight_scale.dim() == 2))
        if tiles is not None:
            return launches.product(rows_of(x), weight, Surroundings(bias=bias, weight_scale=weight_scale), tiles)
        return F.linear(x, dequantised(given), bias)
    if x_scale.numel() == 1:
        quantised = given_rows(rows_of(x), given._replace(input_scale=x_scale.reshape(1)), splittable=False)
    else:
        quantised = Quantised(rows_of(x), x_scale.t().contiguous().t())
    result = product_of_rows(quantised, given, 0, "")
    assert isinstance(result, torch.Tensor)
    return result


# --- joined --------------------------------------------------------------------------------------------------------------------------


def why_not_quant_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: Scale, bias: Scale, activation: str, group: int
) -> str | None:
    return why_not_fp8(x, (weight,), x, bias)


def why_not_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    given: Scale,
    bias: Scale,
    *_: Any,
) -> str | None:
    return why_not_fp8(x, (weight,), x, norm_weight, bias)


def why_not_linear_norm_linear(x: torch.Tensor, *args: Any) -> str | None:
    weight, _, input_scale, bias, residual, norm_weight, _, following, _, _, next_bias, *_ = args
    if x.dtype == E4M3 and input_scale is None:
        return "x is e4m3 without a scale"
    return why_not_fp8(x, (weight, following), None if x.dtype == E4M3 else x, residual, norm_weight, bias, next_bias)


def why_not_block(x: torch.Tensor, *args: Any) -> str | None:
    first, second = halves(args)
    return why_not_linear_norm_linear(x, *first) or why_not_linear_norm_linear(first[4], *with_residual(second, first[4]))


def describe_quant_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: Scale, bias: Scale, activation: str, group: int
) -> str:
    return describe_product(weight, weight_scale, bias, activation)


def describe_norm_linear(x: torch.Tensor, norm_weight: torch.Tensor, epsilon: float, *args: Any) -> str:
    return describe_quant_linear(x, *args)


def describe_linear_norm_linear(x: torch.Tensor, *args: Any) -> str:
    first, following = describe_product(args[0], args[1], args[3], "", splittable=True), describe_product(args[7], args[8], *args[10:12])
    return f"{first}; {following}"


def describe_block(x: torch.Tensor, *args: Any) -> str:
    first, second = halves(args)
    return f"{describe_linear_norm_linear(x, *first)}; {describe_linear_norm_linear(x, *with_residual(second, x))}"


def quant_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_scale: Scale, bias: Scale, activation: str, group: int
) -> torch.Tensor:
    given = Weight(weight, weight_scale, input_scale, bias)
    return activated(product_of_rows(rows_of(x), given, group, activation), activation)


def norm_linear(
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
    x, given = rows_of(x), Weight(weight, weight_scale, input_scale, bias)
    product, _ = _normed_product(x, None, norm_weight, epsilon, given, activation, group)
    return activated(product, activation)


def linear_norm_linear(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    product, hidden = _linear_norm_linear(rows_of(x), *args)
    return activated(product, args[11]), hidden


def block(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = halves(args)
    middle, residual = _linear_norm_linear(rows_of(x), *first)
    down, activation, group = Weight(*second[:4]), first[11], first[12]
    if isinstance(middle, Unactivated) and (product_tiles(x.shape[0], down, "", splittable=True) is not None or takes_quantised(down)):
        quantised = quantise(middle.product, down.input_scale, group, activation=activation, programmatic=is_programmatic(x))
        product, hidden = _linear_norm_linear(quantised, *with_residual(second, residual))
    else:
        product, hidden = _linear_norm_linear(activated(middle, activation), *with_residual(second, residual))
    return activated(product, second[-2]), hidden


# --- parts ---------------------------------------------------------------------------------------------------------------------------


def _linear_norm_linear(
    x: torch.Tensor | Quantised,
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
) -> tuple[torch.Tensor | Unactivated, torch.Tensor]:
    first, second = Weight(weight, weight_scale, input_scale, bias), Weight(next_weight, next_weight_scale, next_input_scale, next_bias)
    residual = rows_of(residual)
    if isinstance(x, torch.Tensor) and x.dtype == E4M3:
        x = given_rows(x, first, splittable=True)
    if residual.shape[0] == 1:
        hidden = product_of_rows(x, first, group, "", residual=residual)
        assert isinstance(hidden, torch.Tensor)
        return _normed_product(hidden, None, norm_weight, epsilon, second, activation, group)
    parts = product_of_rows(x, first, group, "", splittable=True)
    assert isinstance(parts, torch.Tensor)
    left = bias if parts.dim() == 3 else None  # the bias of a split product is added behind its sum
    return _normed_product(parts, residual, norm_weight, epsilon, second, activation, group, left)


def _normed_product(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    weight: Weight,
    activation: str,
    group: int,
    bias: Scale = None,  # of x, where that is the parts of a product
) -> tuple[torch.Tensor | Unactivated, torch.Tensor]:
    rows, programmatic = x.shape[-2], is_programmatic(x)
    if rows == 1 and residual is None:
        return product_of_rows(x, weight, group, activation, norm_weight=norm_weight, epsilon=epsilon), x
    if product_tiles(rows, weight, activation) is not None or takes_quantised(weight):
        quantised, hidden = add_norm_quantise(
            x, residual, norm_weight, epsilon, weight.input_scale, group, bias, programmatic=programmatic
        )  # fmt: skip
        return product_of_rows(quantised, weight, group, activation), hidden
    normed, hidden = launches.add_norm(x, residual, norm_weight, epsilon, bias, programmatic=programmatic)
    return product_of_rows(normed, weight, group, activation), hidden
