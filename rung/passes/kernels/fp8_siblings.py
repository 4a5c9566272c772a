"""The Triton provider of products of the same e4m3 rows by weights that lie apart: one launch while rows are few, one for each
beyond, with the scales of the rows spread once."""

from __future__ import annotations

from typing import Any

import torch

from rung.passes.kernels import launches
from rung.passes.kernels.fp8_launches import E4M3, Quantised, quantise
from rung.passes.kernels.fp8_product import Scale, Weight, product_of_rows
from rung.passes.kernels.launches import Surroundings
from rung.passes.kernels.support import is_programmatic, rows_of, why_not_fp8
from rung.passes.kernels.tiles import Dtypes, most_rows, tiles_for

_FP8 = Dtypes(weights=True, rows=True)


def why_not_gated(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    activation: str,
    out_scale: Scale,
    dtype: torch.dtype,
) -> str | None:
    if gate.shape != up.shape:
        return "the weights differ in shape"
    return _why_not(x, x_scale, (gate, up), (gate_scale, up_scale), (), dtype)


def why_not_three(x: torch.Tensor, x_scale: torch.Tensor, *args: Any) -> str | None:
    return _why_not(x, x_scale, args[0:6:2], args[1:6:2], args[6:9], args[9])


def _why_not(
    x: torch.Tensor, x_scale: torch.Tensor, weights: tuple[Any, ...], scales: tuple[Any, ...], biases: tuple[Any, ...], dtype: torch.dtype
) -> str | None:
    if (reason := why_not_fp8(x, weights, *biases)) is not None:
        return reason
    if x.dtype != E4M3 or dtype != torch.bfloat16:
        return f"{x.dtype} to {dtype}"
    if x_scale.dim() not in (1, 2) or x_scale.shape[-1] != 1 or any(scale.dim() != 1 for scale in scales):
        return "rows or weights have scales of groups"
    return None


def describe_gated(x: torch.Tensor, x_scale: torch.Tensor, gate: torch.Tensor, *args: Any) -> str:
    n, k = gate.shape
    most = most_rows(n, k, activation=args[3], fp8=_FP8, wide=False)
    return f"{n}+{n}x{k} e4m3 {args[3]} to {most} rows, then _scaled_mm"


def describe_three(x: torch.Tensor, x_scale: torch.Tensor, *args: Any) -> str:
    sizes, k = [weight.shape[0] for weight in args[0:6:2]], args[0].shape[1]
    return f"{'+'.join(map(str, sizes))}x{k} e4m3 to {most_rows(sum(sizes), k, fp8=_FP8, wide=False)} rows, then _scaled_mm"


def gated(
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
    x, programmatic = rows_of(x), is_programmatic(x)
    tiles = tiles_for(x.shape[0], *gate.shape, activation=activation, programmatic=programmatic, fp8=_FP8, wide=False)
    if tiles is not None:
        around = Surroundings(
            x_scale=_one_each(x, x_scale), weight_scale=gate_scale, up=up, up_scale=up_scale, activation=activation
        )  # fmt: skip
        values, scales = quantise(launches.product(x, gate, around, tiles), out_scale, 0, programmatic=programmatic)
        return values, scales
    rows = _spread(x, x_scale)
    first, second = (_alone(rows, weight, scale, None) for weight, scale in ((gate, gate_scale), (up, up_scale)))
    values, scales = quantise(first, out_scale, 0, activation=activation, up=second, programmatic=programmatic)
    return values, scales


def three(x: torch.Tensor, x_scale: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weights, scales, biases = rows_of(x), args[0:6:2], args[1:6:2], args[6:9]
    total = sum(weight.shape[0] for weight in weights)
    tiles = tiles_for(x.shape[0], total, x.shape[1], programmatic=is_programmatic(x), fp8=_FP8, wide=False)
    if tiles is not None:
        one, two, three = launches.sibling_products(x, weights, biases, tiles, _one_each(x, x_scale), scales)
        return one, two, three
    rows = _spread(x, x_scale)
    one, two, three = (_alone(rows, *product) for product in zip(weights, scales, biases, strict=True))
    return one, two, three


def _one_each(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """The scale of each row [rows, 1], without a copy of one for all."""
    return x_scale.expand(x.shape[0], 1)


def _alone(rows: Quantised, weight: torch.Tensor, scale: torch.Tensor, bias: Scale) -> torch.Tensor:
    """One of the products, with the kernel that it has by itself."""
    result = product_of_rows(rows, Weight(weight, scale, None, bias), 0, "")
    assert isinstance(result, torch.Tensor)
    return result


def _spread(x: torch.Tensor, x_scale: torch.Tensor) -> Quantised:
    """As `_scaled_mm` wants them: in memory for each row."""
    return Quantised(x, _one_each(x, x_scale).contiguous())
