"""Triton kernels of matrix products with few rows; `row_kernels` has what stands between two of them. Importing this file needs Triton.

Weights are [n, k] with contiguous rows, as `nn.Linear` has them, in the dtype of x or e4m3 with scales: these are converted on their way to
the product (exactly: bf16 has all numbers of e4m3), and the sum is scaled. SCALED: 0 without scales, 1 for one scale an output, 2 for one
a square of 128 x 128; BLOCK_K of `product_kernel` must then divide 128. x may be e4m3 too, with one scale a row, or beside squares one for
each 128 of its columns; nothing is converted then. All sums are float32. With PREFETCH >= 0 a kernel is launched
programmatically: it may start while its predecessor runs, fetches that many elements of each of its weight rows into the L2 cache (which
reads nothing: a predecessor may still write them), and waits before anything else.
"""
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from rung.passes.kernels.row_kernels import _activate


@triton.jit
def _fetch(weight, columns, n, k, weight_stride, first, PREFETCH: tl.constexpr):
    """Start the way of the first PREFETCH elements of these rows, from `first` on, to the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(first + tl.arange(0, PREFETCH // LINE) * LINE, k - 1)
    lines = weight + tl.minimum(columns, n - 1)[:, None].to(tl.int64) * weight_stride + at[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _await(weight, up, columns, n, k, weight_stride, first, PREFETCH: tl.constexpr, GATED: tl.constexpr):
    """The beginning of a kernel that is launched programmatically."""
    if PREFETCH >= 0:
        tl.extra.cuda.gdc_launch_dependents()
        if 1024 // weight.dtype.element_ty.primitive_bitwidth <= PREFETCH:
            _fetch(weight, columns, n, k, weight_stride, first, PREFETCH)
            if GATED:
                _fetch(up, columns, n, k, weight_stride, first, PREFETCH)
        tl.extra.cuda.gdc_wait()


@triton.jit
def _square_scale(scales, row, at, row_end, scale_stride):
    """The scale of the squares that hold rows `row` and the column `at` of a weight, [rows, 1] or [rows, columns]."""
    return tl.load(scales + (row // 128).to(tl.int64) * scale_stride + at // 128, mask=row < row_end, other=0.0)


@triton.jit
def _finish(
    total, total_up, bias, residual, out, m, columns, mask, n, residual_stride,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias, activation and residual of a tile, stored. The product is rounded where it would be a tensor of its own."""
    if BIAS:
        total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            total_up += tl.load(bias + n + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    total = total.to(out.dtype.element_ty).to(tl.float32)
    if ACTIVATION != "":
        total = _activate(total, total_up.to(out.dtype.element_ty).to(tl.float32), ACTIVATION)
    if RESIDUAL:
        total += tl.load(residual + m[:, None].to(tl.int64) * residual_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m[:, None].to(tl.int64) * n + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_product(
    total, values, tile, x_scale, weight_scale, row, start, row_end, scale_stride, SWAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """total plus the product of values [BLOCK_M, BLOCK_K] and tile [BLOCK_N, BLOCK_K], which holds these rows of the weight; x_scale
    [BLOCK_M] is only looked at beside squares."""
    tile = tile.to(values.dtype)
    if SCALED != 2:
        if SWAP:
            total = tl.dot(tile, tl.trans(values), total, input_precision="ieee")
        else:
            total = tl.dot(values, tl.trans(tile), total, input_precision="ieee")
    elif SWAP:
        scale = _square_scale(weight_scale, row[:, None], start, row_end, scale_stride) * x_scale[None, :]
        total += tl.dot(tile, tl.trans(values), input_precision="ieee") * scale
    else:
        scale = _square_scale(weight_scale, row[None, :], start, row_end, scale_stride) * x_scale[:, None]
        total += tl.dot(values, tl.trans(tile), input_precision="ieee") * scale
    return total


@triton.jit
def _product_tile(
    x, x_scale, weight, up, weight_scale, up_scale, bias, residual, out, rows, n, k, row_block, column_block,
    x_stride, x_scale_row, x_scale_stride, weight_stride, scale_stride, residual_stride,
    X_SCALED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLITS: tl.constexpr,
    SCALED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of `product_kernel`; `up` is the second half of a gated weight, `up_scale` where its scales begin (unless SCALED is 2)."""
    split = tl.program_id(1)
    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = m < rows
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    first = split * share
    last = tl.minimum(first + share, k)
    part = tl.arange(0, BLOCK_K)
    x_row = x + m[:, None].to(tl.int64) * x_stride
    w_row = weight + columns[:, None].to(tl.int64) * weight_stride
    up_row = up + columns[:, None].to(tl.int64) * weight_stride
    has_column = columns[:, None] < n
    _await(weight, up, columns, n, k, weight_stride, first, PREFETCH, ACTIVATION != "")

    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_scales = tl.full((BLOCK_M,), 1.0, tl.float32)
    for start in range(first, last, BLOCK_K):
        at = start + part
        if X_SCALED and SCALED == 2:
            x_scales = tl.load(x_scale + m * x_scale_row + (start // 128) * x_scale_stride, mask=inside, other=0.0)
        x_mask = inside[:, None] if EVEN_K else inside[:, None] & (at[None, :] < last)
        values = tl.load(x_row + at[None, :], mask=x_mask, other=0.0)
        if EVEN_N and EVEN_K:
            tile = tl.load(w_row + at[None, :])
        else:
            tile = tl.load(w_row + at[None, :], mask=has_column & (at[None, :] < last), other=0.0)
        total = _add_product(total, values, tile, x_scales, weight_scale, columns, start, n, scale_stride, SWAP, SCALED)
        if ACTIVATION != "":
            if EVEN_N and EVEN_K:
                tile_up = tl.load(up_row + at[None, :])
            else:
                tile_up = tl.load(up_row + at[None, :], mask=has_column & (at[None, :] < last), other=0.0)
            total_up = _add_product(
                total_up, values, tile_up, x_scales, weight_scale, n + columns, start, 2 * n, scale_stride, SWAP, SCALED
            )

    if SWAP:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    if SCALED == 1:
        if X_SCALED:
            x_scales = tl.load(x_scale + m * x_scale_row, mask=inside, other=0.0)
        total *= tl.load(weight_scale + columns, mask=columns < n, other=0.0)[None, :] * x_scales[:, None]
        if ACTIVATION != "":
            total_up *= tl.load(up_scale + columns, mask=columns < n, other=0.0)[None, :] * x_scales[:, None]
    mask = inside[:, None] & (columns[None, :] < n)
    if SPLITS > 1:
        tl.store(out + (split.to(tl.int64) * rows + m[:, None]) * n + columns[None, :], total, mask=mask)
    else:
        _finish(total, total_up, bias, residual, out, m, columns, mask, n, residual_stride, ACTIVATION, BIAS, RESIDUAL)


@triton.jit(do_not_specialize=["rows", "m_blocks", "x_scale_row", "x_scale_stride"])
def product_kernel(
    x, x_scale, weight, up, weight_scale, up_scale, bias, residual, out, rows, n, k, m_blocks,
    x_stride, x_scale_row, x_scale_stride, weight_stride, scale_stride, residual_stride,
    X_SCALED: tl.constexpr, APART: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLITS: tl.constexpr,
    SCALED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = x [rows, k] @ weight.T, then bias, the activation of the two halves of the product (weight is then [2 * n, k], or
    APART [n, k] as `up` is), and a residual added.

    SWAP has the weights as the left side, whose tiles are the large ones. With SPLITS > 1 each share of k writes its sum as float32 to
    out [SPLITS, rows, n], and nothing stands around it. Grid: (blocks of n * blocks of rows, SPLITS)."""
    block = tl.program_id(0)
    _product_tile(
        x, x_scale, weight, up if APART else weight + tl.cast(n, tl.int64) * weight_stride,
        weight_scale, up_scale if APART else weight_scale + n, bias, residual, out, rows, n, k,
        block % m_blocks, block // m_blocks, x_stride, x_scale_row, x_scale_stride, weight_stride, scale_stride, residual_stride,
        X_SCALED, ACTIVATION, BIAS, RESIDUAL, SPLITS, SCALED, EVEN_N, EVEN_K, SWAP, PREFETCH, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _vector_tile(
    x, x_scale, weight, up, weight_scale, up_scale, bias, residual, norm_weight, out, n, k, column_block, epsilon,
    weight_stride, scale_stride,
    X_SCALED: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The outputs of one program of `vector_kernel`."""
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, BLOCK_K)
    w_row = weight + columns[:, None].to(tl.int64) * weight_stride
    up_row = up + columns[:, None].to(tl.int64) * weight_stride
    has_column = columns[:, None] < n
    _await(weight, up, columns, n, k, weight_stride, 0, PREFETCH, ACTIVATION != "")

    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        at = start + part
        if EVEN_N and EVEN_K:
            tile = tl.load(w_row + at[None, :])
        else:
            tile = tl.load(w_row + at[None, :], mask=has_column & (at[None, :] < k), other=0.0)
        if ACTIVATION != "":
            if EVEN_N and EVEN_K:
                tile_up = tl.load(up_row + at[None, :])
            else:
                tile_up = tl.load(up_row + at[None, :], mask=has_column & (at[None, :] < k), other=0.0)
        values = tl.load(x + at).to(tl.float32) if EVEN_K else tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.load(norm_weight + at) if EVEN_K else tl.load(norm_weight + at, mask=at < k, other=0.0)
            squares += values * values
            values *= scale.to(tl.float32)
        tile = tile.to(tl.float32)
        if SCALED == 2:
            tile *= _square_scale(weight_scale, columns[:, None], at[None, :], n, scale_stride)
        total += tile * values[None, :]
        if ACTIVATION != "":
            tile_up = tile_up.to(tl.float32)
            if SCALED == 2:
                tile_up *= _square_scale(weight_scale, n + columns[:, None], at[None, :], 2 * n, scale_stride)
            total_up += tile_up * values[None, :]
    product = tl.sum(total, axis=1)
    product_up = tl.sum(total_up, axis=1) if ACTIVATION != "" else product
    if SCALED == 1:
        product *= tl.load(weight_scale + columns, mask=columns < n, other=0.0)
        if ACTIVATION != "":
            product_up *= tl.load(up_scale + columns, mask=columns < n, other=0.0)
    if X_SCALED:
        product *= tl.load(x_scale)
        product_up *= tl.load(x_scale)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / k + epsilon)
        product *= factor
        product_up *= factor
    _finish(
        product[None, :], product_up[None, :], bias, residual, out, tl.zeros((1,), tl.int32), columns, columns[None, :] < n, n, 0,
        ACTIVATION, BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit
def vector_kernel(
    x, x_scale, weight, up, weight_scale, up_scale, bias, residual, norm_weight, out, n, k, epsilon, weight_stride, scale_stride,
    X_SCALED: tl.constexpr, APART: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SCALED: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`product_kernel` for one row, without the matrix units, of x normed before when NORM.

    The norm needs no pass of its own: x * norm_weight goes into the product, and 1 / rms scales the sum. Grid: (blocks of n)."""
    _vector_tile(
        x, x_scale, weight, up if APART else weight + tl.cast(n, tl.int64) * weight_stride,
        weight_scale, up_scale if APART else weight_scale + n, bias, residual, norm_weight, out, n, k, tl.program_id(0), epsilon,
        weight_stride, scale_stride,
        X_SCALED, NORM, ACTIVATION, BIAS, RESIDUAL, SCALED, PREFETCH, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
