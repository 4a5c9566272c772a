"""Products whose rows have the same bits however many rows there are: one shape of the work for every number of rows.

On a device that is one tile of our product kernel, the same for 1 row and for 1000: each element of a result is a sum over k in one order,
wherever in a tile its row stands. Elsewhere each row is multiplied by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.kernels import launches
from rung.passes.kernels.launches import Surroundings, Tiles
from rung.passes.kernels.support import rows_of, runs_triton, wants_gradient

Scale = torch.Tensor | None
Body = Callable[..., torch.Tensor]
NOT_ASKED = "batch invariance was not asked for"
_HALF = (torch.bfloat16, torch.float16)


def tiles(dtype: torch.dtype) -> Tiles:
    """64 rows and 64 outputs: what was measured to win for 64 rows, within the shared memory of 96 KiB that any device from capability 8.0
    on has. Nothing is launched programmatically."""
    if dtype in _HALF:
        return Tiles(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=6, swap=True)
    return Tiles(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=3, swap=True)


def why_not_linear(x: torch.Tensor, weight: torch.Tensor, bias: Scale, activation: str, invariant: bool = False) -> str | None:
    if not invariant:
        return NOT_ASKED
    return None if weight.stride(-1) == 1 else "the weight's rows are not contiguous"


def linear(body: Body, x: torch.Tensor, weight: torch.Tensor, bias: Scale, activation: str, invariant: bool = True) -> torch.Tensor:
    """`linear` of the IR ops, whose meaning `body` is."""
    if runs_triton(x) and not wants_gradient((x, weight, bias)):
        return launches.product(rows_of(x), weight, Surroundings(bias=bias, activation=activation), tiles(x.dtype))
    return _row_by_row(x, lambda row: body(row, weight, bias, activation))


def why_not_fp8_linear(
    x: torch.Tensor,
    x_scale: Scale,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: Scale,
    dtype: torch.dtype,
    invariant: bool = False,
) -> str | None:
    return None if invariant else NOT_ASKED


def fp8_linear(
    scaled: Body,
    dequantised: Body,
    x: torch.Tensor,
    x_scale: Scale,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: Scale,
    dtype: torch.dtype,
    invariant: bool = True,
) -> torch.Tensor:
    """`fp8_linear` of the IR ops; `scaled(x, x_scale)` and `dequantised(weight, weight_scale)` are its operands in float32. On a device
    e4m3 activations are scaled first, and multiplied in `dtype`."""
    rows = scaled(x, x_scale).flatten(0, -2)
    if runs_triton(x) and not wants_gradient((x, x_scale, bias)):
        around = Surroundings(bias=bias, weight_scale=weight_scale)
        result = launches.product(rows.to(dtype), weight, around, tiles(dtype))
    else:
        matrix, added = dequantised(weight, weight_scale), None if bias is None else bias.float()
        result = _row_by_row(rows, lambda row: F.linear(row, matrix, added)).to(dtype)
    shaped: torch.Tensor = result.view(*x.shape[:-1], result.shape[-1])
    return shaped


def describe_fp8(x: torch.Tensor, x_scale: Scale, weight: torch.Tensor, *_: Any) -> str:
    return f"{weight.shape[0]}x{weight.shape[1]} e4m3"


def _row_by_row(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Each row is copied first: where in memory it lies may decide how a library sums."""
    if x.shape[0] == 0:
        return product(x)
    return torch.cat([product(row.clone()) for row in x.split(1)])
