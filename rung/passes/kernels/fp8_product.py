"""The product of rows by an e4m3 weight, with the kernel that this many rows get; the providers of the ops are made of it.

One row stays in bf16. More are quantised, unless they come so, and e4m3 is multiplied by e4m3: by our kernel while rows are few, else by
cuBLAS. Where cuBLAS does not take a weight's squares of scales, it multiplies the weight in bf16.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rung.passes.kernels import launches
from rung.passes.kernels.fp8_launches import Quantised, quantise
from rung.passes.kernels.launches import Surroundings, Tiles
from rung.passes.kernels.support import is_programmatic
from rung.passes.kernels.tiles import Dtypes, say_rows, tiles_for
from rung.passes.kernels.wide import why_not_wide
from rung.torch_compat import scaled_mm

Scale = torch.Tensor | None
_SQUARE = 128
_BLOCKWISE_K = 4 * _SQUARE  # cuBLAS takes the scales of squares where their rows are multiples of four


class Weight(NamedTuple):
    """Of one product; without `input_scale` rows are quantised by scales of their own."""

    values: torch.Tensor  # e4m3 [n, k]
    scale: torch.Tensor  # float32 [n], or [n / 128, k / 128] of squares
    input_scale: Scale  # float32 [1], of all rows
    bias: Scale  # [n]


class Unactivated(NamedTuple):
    """A product by cuBLAS whose activation is still to come: [rows, 2 * n]."""

    product: torch.Tensor


def product_of_rows(
    x: torch.Tensor | Quantised, weight: Weight, group: int, activation: str, *, splittable: bool = False, **around: Any
) -> torch.Tensor | Unactivated:
    """[rows, n]; where it is splittable, perhaps the parts [splits, rows, n] without the bias."""
    rows = x.values.shape[0] if isinstance(x, Quantised) else x.shape[0]
    tiles = product_tiles(rows, weight, activation, splittable=splittable)
    if isinstance(x, Quantised):
        if tiles is not None and (tiles.block_m > 1 or weight.scale.dim() == 1):  # that for one row knows no scales of squares
            around |= {"x_scale": x.scale, "weight_scale": weight.scale}
            return launches.product(x.values, weight.values, Surroundings(bias=weight.bias, activation=activation, **around), tiles)
        result = _scaled(x, weight)
        return Unactivated(result) if activation else result
    if rows <= 1:
        assert tiles is not None, "one row always has tiles"
        return launches.product(
            x, weight.values, Surroundings(bias=weight.bias, weight_scale=weight.scale, activation=activation, **around), tiles
        )
    assert not around
    if tiles is None and not takes_quantised(weight):
        result = F.linear(x, dequantised(weight), weight.bias)
        return Unactivated(result) if activation else result
    quantised = quantise(x, weight.input_scale, group, programmatic=is_programmatic(x))
    return product_of_rows(quantised, weight, group, activation, splittable=splittable)


def given_rows(x: torch.Tensor, weight: Weight, *, splittable: bool) -> Quantised:
    """Rows that came as e4m3. Our kernels read the one scale for each row; cuBLAS wants it as often as there are
    rows, which is a kernel of its own."""
    rows, scale = x.shape[0], weight.input_scale
    assert scale is not None
    few = product_tiles(rows, weight, "", splittable=splittable) is not None
    return Quantised(x, scale.expand(rows, 1) if few else scale.repeat(rows).unsqueeze(1))


def activated(made: torch.Tensor | Unactivated, activation: str) -> torch.Tensor:
    """[rows, n]: the activation behind a product, where it is still to come."""
    if isinstance(made, torch.Tensor):
        return made
    return launches.activate(made.product, activation, programmatic=is_programmatic(made.product))


def takes_quantised(weight: Weight) -> bool:
    """Whether cuBLAS multiplies e4m3 rows by the weight, scales included."""
    return weight.scale.dim() == 1 or weight.values.shape[1] % _BLOCKWISE_K == 0


def dequantised(weight: Weight) -> torch.Tensor:
    """The weight in bf16."""
    values, scale = weight.values.bfloat16(), weight.scale
    if scale.dim() == 1:
        return values * scale.bfloat16().unsqueeze(1)
    wide = scale.bfloat16().repeat_interleave(_SQUARE, 0).repeat_interleave(_SQUARE, 1)
    return values * wide


def product_tiles(rows: int, weight: Weight, activation: str, *, splittable: bool = False) -> Tiles | None:
    """The tiles of our kernel for so many rows, or None: cuBLAS."""
    n, k = weight.values.shape
    n //= 2 if activation else 1
    ask = functools.partial(
        tiles_for, rows, n, k, activation=activation, splittable=splittable,
        programmatic=is_programmatic(weight.values), fp8=_dtypes(weight.scale),
    )  # fmt: skip
    tiles = ask()
    return ask(wide=False) if tiles is not None and tiles.wide and why_not_wide(weight.values, weight.values, weight.bias) else tiles


def describe_product(weight: torch.Tensor, weight_scale: torch.Tensor, bias: Scale, activation: str, *, splittable: bool = False) -> str:
    """How many rows our kernels take for a weight, and who takes more."""
    n, k = weight.shape
    said = say_rows(weight, bias, activation=activation, splittable=splittable, fp8=_dtypes(weight_scale))
    return f"{n}x{k} e4m3{' ' + activation if activation else ''} {said}, then {_many(weight, weight_scale)}"


def _scaled(x: Quantised, weight: Weight) -> torch.Tensor:
    if x.values.shape[0] == 0:
        return torch.empty((0, weight.values.shape[0]), dtype=torch.bfloat16, device=x.values.device)
    return scaled_mm(*x, weight.values, weight.scale.contiguous(), weight.bias, torch.bfloat16)


def _dtypes(weight_scale: torch.Tensor) -> Dtypes:
    return Dtypes(weights=True, rows=True, squares=weight_scale.dim() == 2)


def _many(weight: torch.Tensor, weight_scale: torch.Tensor) -> str:
    return "_scaled_mm" if takes_quantised(Weight(weight, weight_scale, None, None)) else "bf16 by cuBLAS"
