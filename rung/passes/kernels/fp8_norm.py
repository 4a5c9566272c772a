"""The Triton provider of a product by an e4m3 weight with the sum, the norm and the quantisation behind it. Few rows may split the product,
and leave the sum of its parts to the kernel that norms."""

from __future__ import annotations

import torch

from rung.passes.kernels.fp8_launches import E4M3, Quantised, add_norm_quantise
from rung.passes.kernels.fp8_product import Scale, Weight, describe_product, given_rows, product_of_rows
from rung.passes.kernels.support import is_programmatic, rows_of, why_not_fp8


def why_not(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: Scale,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    out_scale: Scale,
) -> str | None:
    if (reason := why_not_fp8(x, (weight,), bias, residual, norm_weight)) is not None:
        return reason
    if x.dtype != E4M3:
        return f"x is of dtype {x.dtype}, not torch.float8_e4m3fn"
    one_each = x_scale.dim() in (1, 2) and x_scale.shape[-1] == 1 and weight_scale.dim() == 1
    return None if one_each else "rows or weights have scales of groups"


def describe(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: Scale, *_: object
) -> str:  # fmt: skip
    return describe_product(weight, weight_scale, bias, "", splittable=True)


def linear_norm(
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
    x, residual, programmatic = rows_of(x), rows_of(residual), is_programmatic(x)
    given = Weight(weight, weight_scale, x_scale.reshape(1) if x_scale.numel() == 1 else None, bias)
    rows = Quantised(x, x_scale.contiguous()) if given.input_scale is None else given_rows(x, given, splittable=True)
    if x.shape[0] == 1:
        hidden = product_of_rows(rows, given, 0, "", residual=residual)
        assert isinstance(hidden, torch.Tensor)
        made, _ = add_norm_quantise(hidden, None, norm_weight, epsilon, out_scale, 0, programmatic=programmatic)
        return *made, hidden
    parts = product_of_rows(rows, given, 0, "", splittable=True)
    assert isinstance(parts, torch.Tensor)
    left = bias if parts.dim() == 3 else None  # the bias of a split product is added behind its sum
    made, hidden = add_norm_quantise(parts, residual, norm_weight, epsilon, out_scale, 0, left, programmatic=programmatic)
    return *made, hidden
