"""Launching the products of more rows than Triton's tiles are good for. Names the kernels, compiles nothing."""

from __future__ import annotations

from typing import Any

import torch

from rung.launch import TritonLauncher, multiprocessors, why_no_nvrtc
from rung.launch.tensor_map import tensor_map
from rung.passes.kernels.ring_source import ROW_BYTES
from rung.passes.kernels.split_kernel import OUTPUTS
from rung.passes.kernels.support import is_aligned
from rung.passes.kernels.wide_kernel import ROWS

WIDE = TritonLauncher("rung.passes.kernels.wide_kernel", "wide_product_kernel")
SPLIT = TritonLauncher("rung.passes.kernels.split_kernel", "split_product_kernel")
_WARPS = 9


def why_not_wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """The reason against both kernels, or None. Reads nothing of the size of dimension 0 of x."""
    if bias is not None:
        return "it adds no bias"
    if not (is_aligned(x) and is_aligned(weight)) or weight.shape[0] % 16:
        return "rows are not aligned to 16 bytes"
    if x.stride(0) < x.shape[1]:
        return "rows overlap"
    if WIDE.road != "prebound":
        return f"launches go through {WIDE.road}"
    return why_no_nvrtc()


def wide_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: str,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    *,
    blocks: int,
    block_n: int,
    stages: int,
    programmatic: bool,
    parts: int = 1,
) -> torch.Tensor:
    """act(x @ gate.T) * (x @ up.T), bf16 [rows, n], of x [rows, k] and weight [2 * n, k], the gates first; without an activation
    x @ weight.T, weight [n, k]. Both bf16, or e4m3 with x_scale [rows, 1] and weight_scale [2 * n] or [n], float32. `blocks` of a cluster
    take 128 rows each and share the weights; a tile has twice `block_n` rows of them. With `parts` > 1, in bf16 and without an
    activation, the sums of each part of k, float32 [parts, rows, n]."""
    rows, n = x.shape[0], weight.shape[0] // (2 if activation else 1)
    assert parts == 1 or (not activation and x_scale is None and parts * ROW_BYTES <= x.shape[1] * x.element_size())
    shape, dtype = ((rows, n), torch.bfloat16) if parts == 1 else ((parts, rows, n), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    row_tiles = -(-rows // (ROWS * blocks)) * blocks  # of equal numbers of rows: a box with rows outside of the matrix is slow
    tiles = row_tiles // blocks * -(-n // (block_n if activation else 2 * block_n)) * parts
    clusters = min(tiles, multiprocessors(x.device) // blocks)
    WIDE.run(
        (clusters, 1, 1), tensor_map(x, -(-rows // row_tiles)), tensor_map(weight, block_n), *_operands(x, x_scale, weight_scale, out),
        BLOCK_N=block_n, BLOCKS=blocks, PARTS=parts, STAGES=stages, E4M3=x_scale is not None, ACTIVATION=activation,
        num_warps=_WARPS, num_ctas=blocks, launch_pdl=programmatic,
    )  # fmt: skip
    return out


def split_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    *,
    splits: int,
    block_m: int,
    stages: int,
    programmatic: bool,
) -> torch.Tensor:
    """x @ weight.T, bf16 [rows, n], of x [rows, k] and weight [n, k], whose k is shared by the `splits` blocks of a cluster; dtypes and
    scales as those of `wide_product`. At most `block_m` rows: 256 or fewer, a multiple of 32 for each block."""
    rows, n = x.shape[0], weight.shape[0]
    assert rows <= block_m
    out = torch.empty((rows, n), dtype=torch.bfloat16, device=x.device)
    SPLIT.run(
        (-(-n // OUTPUTS), 1, 1), tensor_map(x, rows), tensor_map(weight, OUTPUTS), *_operands(x, x_scale, weight_scale, out),
        BLOCK_M=block_m, SPLITS=splits, STAGES=stages, E4M3=x_scale is not None,
        num_warps=_WARPS, num_ctas=splits, launch_pdl=programmatic,
    )  # fmt: skip
    return out


def _operands(x: torch.Tensor, x_scale: torch.Tensor | None, weight_scale: torch.Tensor | None, out: torch.Tensor) -> tuple[Any, ...]:
    """What both kernels are given behind the maps of x and of the weights; where there is no scale they read none."""
    (rows, n), steps = out.shape[-2:], -(-x.shape[1] * x.element_size() // ROW_BYTES)
    scales = out if x_scale is None else x_scale, out if weight_scale is None else weight_scale
    return out, *scales, rows, n, steps, 0 if x_scale is None else x_scale.stride(0), n
