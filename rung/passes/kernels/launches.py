"""Launching the product kernels: tensors in, tensors out. Names the kernels, imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rung.launch import TritonLauncher
from rung.passes.kernels.wide import split_product, wide_product

_KERNELS = "rung.passes.kernels.product_kernels"  # named, not imported: it needs Triton, which a warm start does without
PRODUCT = TritonLauncher(_KERNELS, "product_kernel")
VECTOR = TritonLauncher(_KERNELS, "vector_kernel")
_SIBLINGS = "rung.passes.kernels.sibling_kernels"
SIBLING_PRODUCTS = TritonLauncher(_SIBLINGS, "sibling_products_kernel")
SIBLING_VECTORS = TritonLauncher(_SIBLINGS, "sibling_vectors_kernel")
_ROWS = "rung.passes.kernels.row_kernels"
ADD_NORM = TritonLauncher(_ROWS, "add_norm_kernel")
ACTIVATE = TritonLauncher(_ROWS, "activate_kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a product is cut into programs. `block_m` 1 is the kernel for one row, which uses no matrix units."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1
    prefetch: int = -1  # elements of each weight row fetched before the predecessor has ended; -1: no programmatic launch
    swap: bool = False  # the weights are the left side: tiles of 64 of them and more then use the matrix units' wide instructions
    wide: int = 0  # blocks of a cluster of the kernels in CUDA C++; 0: the kernels of Triton
    shares_k: bool = False  # of these blocks each has a part of k and all rows; else each has 128 rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is computed together with a product."""

    bias: torch.Tensor | None = None  # [n], [2 * n] with an activation
    residual: torch.Tensor | None = None  # [rows, n], added last
    norm_weight: torch.Tensor | None = None  # [k]: the rows of x are normed first
    epsilon: float = 0.0
    # of e4m3 rows, float32: [rows, 1], perhaps one for all, or beside scales of squares [rows, k / 128] with stride 1 along the rows
    x_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None  # of an e4m3 weight, float32: [n], or [n / 128, k / 128]; n doubled with an activation
    activation: str = ""  # "silu" or "gelu": of the first half of the product, times the second
    # where the second half lies apart: [n, k] with the strides of the weight, and [n]; then there is no bias
    up: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None


def product(x: torch.Tensor, weight: torch.Tensor, around: Surroundings, tiles: Tiles) -> torch.Tensor:
    """x [rows, k] @ weight.T and what is around it: [rows, n] in x's dtype, for e4m3 in the residual's or bf16; with `tiles.splits` > 1
    the sums of each share of k, float32 [splits, rows, n], and nothing around."""
    rows, k = x.shape
    n = weight.shape[0] // (2 if around.activation and around.up is None else 1)
    scale, up_scale = (None if scale is None else scale.contiguous() for scale in (around.weight_scale, around.up_scale))
    if tiles.wide and rows:
        assert around.up is None, "kernels in CUDA C++ take both halves of a weight together"
        if tiles.shares_k:
            return split_product(
                x, weight, around.x_scale, scale,
                splits=tiles.wide, block_m=tiles.block_m, stages=tiles.num_stages, programmatic=tiles.prefetch >= 0,
            )  # fmt: skip
        return wide_product(
            x, weight, around.activation, around.x_scale, scale,
            blocks=tiles.wide, block_n=tiles.block_n, stages=tiles.num_stages, programmatic=tiles.prefetch >= 0, parts=tiles.splits,
        )  # fmt: skip
    if tiles.splits > 1:
        out = torch.empty((tiles.splits, rows, n), dtype=torch.float32, device=x.device)
    else:
        wide = torch.bfloat16 if around.residual is None else around.residual.dtype
        out = torch.empty((rows, n), dtype=x.dtype if around.x_scale is None else wide, device=x.device)
    if rows == 0:
        return out
    bias, residual, norm_weight = around.bias, around.residual, around.norm_weight
    named = {
        "APART": around.up is not None,
        "ACTIVATION": around.activation,
        "BIAS": bias is not None and tiles.splits == 1,
        "RESIDUAL": residual is not None,
        "SCALED": 0 if scale is None else scale.dim(),
        "EVEN_N": n % tiles.block_n == 0,
        "EVEN_K": k % (tiles.block_k * tiles.splits) == 0,
        "PREFETCH": tiles.prefetch,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "launch_pdl": tiles.prefetch >= 0,
    }
    columns = -(-n // tiles.block_n)
    added, biased, scales = (x if other is None else other for other in (residual, bias, scale))
    scale_stride, x_scale = scales.stride(0), around.x_scale
    up, up_scales = weight if around.up is None else around.up, scales if up_scale is None else up_scale
    if tiles.block_m == 1:
        VECTOR.run(
            (columns, 1, 1),
            x, x if x_scale is None else x_scale, weight, up, scales, up_scales, biased, added,
            x if norm_weight is None else norm_weight, out, n, k, around.epsilon, weight.stride(0), scale_stride,
            X_SCALED=x_scale is not None, NORM=norm_weight is not None, STAGES=tiles.num_stages, **named,
        )  # fmt: skip
        return out
    blocks = -(-rows // tiles.block_m)
    PRODUCT.run(
        (columns * blocks, tiles.splits, 1),
        x, x if x_scale is None else x_scale, weight, up, scales, up_scales, biased, added, out, rows, n, k, blocks,
        x.stride(0), *((0, 0) if x_scale is None else x_scale.stride()),
        weight.stride(0), scale_stride, 0 if residual is None else residual.stride(0),
        X_SCALED=x_scale is not None, SPLITS=tiles.splits, SWAP=tiles.swap, BLOCK_M=tiles.block_m, num_stages=tiles.num_stages, **named,
    )  # fmt: skip
    return out


def sibling_products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tiles: Tiles,
    x_scale: torch.Tensor | None = None,
    scales: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """x [rows, k] @ weight.T of three contiguous weights in one launch; each [rows, n] in x's dtype. All have a bias or none.

    With `x_scale` ([rows, 1]) rows and weights are e4m3, the weights with scales [n], and the results bf16."""
    rows, k = x.shape
    dtype = x.dtype if x_scale is None else torch.bfloat16
    outs = tuple(torch.empty((rows, weight.shape[0]), dtype=dtype, device=x.device) for weight in weights)
    if rows == 0:
        return outs
    added = [x if bias is None else bias for bias in biases]
    sizes = [weight.shape[0] for weight in weights]
    scaled = x, x if x_scale is None else x_scale, *weights, *((scale.contiguous() for scale in scales) if scales else (x, x, x))
    named = {
        "SCALED": x_scale is not None,
        "BIAS": biases[0] is not None,
        "EVEN_N": all(n % tiles.block_n == 0 for n in sizes),
        "EVEN_K": k % tiles.block_k == 0,
        "PREFETCH": tiles.prefetch,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "launch_pdl": tiles.prefetch >= 0,
    }
    columns = sum(-(-n // tiles.block_n) for n in sizes)
    if tiles.block_m == 1:
        SIBLING_VECTORS.run((columns, 1, 1), *scaled, *added, *outs, *sizes, k, STAGES=tiles.num_stages, **named)
        return outs
    blocks = -(-rows // tiles.block_m)
    SIBLING_PRODUCTS.run(
        (columns * blocks, 1, 1),
        *scaled, *added, *outs, rows, *sizes, k, blocks, x.stride(0), 0 if x_scale is None else x_scale.stride(0),
        SWAP=tiles.swap, BLOCK_M=tiles.block_m, num_stages=tiles.num_stages, **named,
    )  # fmt: skip
    return outs


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    bias: torch.Tensor | None = None,
    *,
    programmatic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, hidden = x + residual), both [rows, n]; x is [rows, n], or the sums of a split product, to which the bias belongs."""
    (rows, n), parts = x.shape[-2:], x.shape[0] if x.dim() == 3 else 1
    normed = torch.empty((rows, n), dtype=norm_weight.dtype, device=x.device)
    hidden = x if residual is None else torch.empty_like(normed)
    ADD_NORM.run(
        (rows, 1, 1),
        x, x if bias is None else bias, x if residual is None else residual, norm_weight, hidden, normed, rows, n, epsilon,
        x.stride(-2), 0 if residual is None else residual.stride(0),
        PARTS=parts, BIAS=bias is not None, RESIDUAL=residual is not None,
        PROGRAMMATIC=programmatic, launch_pdl=programmatic, BLOCK=1 << (n - 1).bit_length(), num_warps=row_warps(rows, n, parts),
    )  # fmt: skip
    return normed, hidden


def row_warps(rows: int, n: int, parts: int) -> int:
    """Warps of a program that sums the parts of a row of n numbers and norms it. Measured on an H200 (docs/performance.md): more pay for 97
    to 256 rows, where there are parts from 65 on, and cost a fifth at 2048."""
    if n <= 2048:
        return 4
    return 32 if (96 if parts == 1 else 64) < rows <= 256 else 8


def activate(x: torch.Tensor, activation: str, *, programmatic: bool = False) -> torch.Tensor:
    """The activation of the first half of x [rows, 2 * n] times the second: [rows, n]."""
    n = x.shape[1] // 2
    return activate_pair(x[:, :n], x[:, n:], activation, programmatic=programmatic)


def activate_pair(gate: torch.Tensor, up: torch.Tensor, activation: str, *, programmatic: bool = False) -> torch.Tensor:
    """The activation of gate times up, both [rows, n] with the elements of a row side by side."""
    rows, n = gate.shape
    out = torch.empty((rows, n), dtype=gate.dtype, device=gate.device)
    block = min(1024, 1 << (n - 1).bit_length())
    ACTIVATE.run(
        (rows, -(-n // block), 1),
        gate, up, out, n, gate.stride(0), up.stride(0),
        ACTIVATION=activation, PROGRAMMATIC=programmatic, launch_pdl=programmatic, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
