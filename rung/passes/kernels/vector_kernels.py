"""The Triton kernel of matrix products with one to four rows, without the matrix units; see `product_kernels`. Importing this file needs
Triton.

So few rows are bound by the bytes of the weights all the same, and what is around a product costs nothing here: rows are multiplied by the
weights of a norm on their way, and 1 / rms scales the sum, where matrix units would want normed rows back in shared memory first.
"""
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,var-annotated,unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from rung.passes.kernels.product_kernels import _await, _finish, _square_scale


@triton.jit
def _folded(values, ROWS: tl.constexpr, EACH: tl.constexpr):
    """Sums over EACH neighbours in the last dimension, which one thread holds: with several rows a sum an element would fill registers."""
    if ROWS == 1:
        return values
    elif len(values.shape) == 1:
        return tl.sum(tl.reshape(values, (values.shape[0] // EACH, EACH)), axis=1)
    else:
        return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // EACH, EACH)), axis=2)


@triton.jit
def _joined(parts, ROWS: tl.constexpr):
    """The tensors of 2 or 4 rows as one, so that they are reduced together: [..., 2] or [..., 2, 2], in the order of the rows."""
    return tl.join(parts[0], parts[1]) if ROWS == 2 else tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))


@triton.jit
def _sums(parts, ROWS: tl.constexpr):
    """The sums of each row's [outputs, lanes] over the lanes: [ROWS, outputs]."""
    if ROWS == 1:
        return tl.sum(parts[0], axis=1)[None, :]
    else:
        sums = tl.sum(_joined(parts, ROWS), axis=1)
        return tl.trans(tl.reshape(sums, (parts[0].shape[0], ROWS)))


@triton.jit
def _sums_of_squares(parts, ROWS: tl.constexpr):
    """The sums of each row's [lanes]: [ROWS]."""
    if ROWS == 1:
        return tl.sum(parts[0], axis=0)[None]
    else:
        return tl.reshape(tl.sum(_joined(parts, ROWS), axis=0), (ROWS,))


@triton.jit
def _row(m, rows, stride):
    """Where row m begins; rows that are not there are the last one again."""
    return tl.minimum(m, rows - 1).to(tl.int64) * stride


@triton.jit
def _vector_tile(
    x, x_scale, weight, up, weight_scale, up_scale, bias, residual, norm_weight, out, rows, n, k, column_block, epsilon,
    x_stride, x_scale_row, weight_stride, scale_stride, residual_stride,
    X_SCALED: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr, PREFETCH: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The outputs of one program of `vector_kernel`."""
    # As many elements as one load of 16 bytes has.
    EACH: tl.constexpr = 1 if ROWS == 1 else 128 // weight.dtype.element_ty.primitive_bitwidth
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, BLOCK_K)
    w_row = weight + columns[:, None].to(tl.int64) * weight_stride
    up_row = up + columns[:, None].to(tl.int64) * weight_stride
    has_column = columns[:, None] < n
    _await(weight, up, columns, n, k, weight_stride, 0, PREFETCH, ACTIVATION != "")

    totals = ()
    totals_up = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros((BLOCK_N, BLOCK_K // EACH), tl.float32),)
        totals_up += (tl.zeros((BLOCK_N, BLOCK_K // EACH), tl.float32),)
        squares += (tl.zeros((BLOCK_K // EACH,), tl.float32),)
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
        loaded = ()
        for m in tl.static_range(ROWS):
            x_row = x if ROWS == 1 else x + _row(m, rows, x_stride)
            loaded += (tl.load(x_row + at) if EVEN_K else tl.load(x_row + at, mask=at < k, other=0.0),)
        if NORM:
            scale = tl.load(norm_weight + at) if EVEN_K else tl.load(norm_weight + at, mask=at < k, other=0.0)
        tile = tile.to(tl.float32)
        if SCALED == 2:
            tile *= _square_scale(weight_scale, columns[:, None], at[None, :], n, scale_stride)
        if ACTIVATION != "":
            tile_up = tile_up.to(tl.float32)
            if SCALED == 2:
                tile_up *= _square_scale(weight_scale, n + columns[:, None], at[None, :], 2 * n, scale_stride)
        summed = ()
        summed_up = ()
        squared = ()
        for m in tl.static_range(ROWS):
            values = loaded[m].to(tl.float32)
            if NORM:
                squared += (squares[m] + _folded(values * values, ROWS, EACH),)
                values *= scale.to(tl.float32)
            else:
                squared += (squares[m],)
            summed += (totals[m] + _folded(tile * values[None, :], ROWS, EACH),)
            if ACTIVATION != "":
                summed_up += (totals_up[m] + _folded(tile_up * values[None, :], ROWS, EACH),)
            else:
                summed_up += (totals_up[m],)
        totals = summed
        totals_up = summed_up
        squares = squared

    product = _sums(totals, ROWS)
    product_up = _sums(totals_up, ROWS) if ACTIVATION != "" else product
    row = tl.arange(0, ROWS)
    if SCALED == 1:
        product *= tl.load(weight_scale + columns, mask=columns < n, other=0.0)[None, :]
        if ACTIVATION != "":
            product_up *= tl.load(up_scale + columns, mask=columns < n, other=0.0)[None, :]
    if X_SCALED:
        row_scale = tl.load(x_scale + _row(row, rows, x_scale_row))[:, None]
        product *= row_scale
        product_up *= row_scale
    if NORM:
        factor = tl.rsqrt(_sums_of_squares(squares, ROWS) / k + epsilon)[:, None]
        product *= factor
        product_up *= factor
    mask = columns[None, :] < n if ROWS == 1 else (row[:, None] < rows) & (columns[None, :] < n)
    _finish(product, product_up, bias, residual, out, row, columns, mask, n, residual_stride, ACTIVATION, BIAS, RESIDUAL)


@triton.jit(do_not_specialize=["rows", "x_scale_row", "residual_stride"])
def vector_kernel(
    x, x_scale, weight, up, weight_scale, up_scale, bias, residual, norm_weight, out, rows, n, k, epsilon,
    x_stride, x_scale_row, weight_stride, scale_stride, residual_stride,
    X_SCALED: tl.constexpr, APART: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SCALED: tl.constexpr, PREFETCH: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`product_kernel` for up to ROWS rows, without the matrix units, of x normed before when NORM. Grid: (blocks of n)."""
    _vector_tile(
        x, x_scale, weight, up if APART else weight + tl.cast(n, tl.int64) * weight_stride,
        weight_scale, up_scale if APART else weight_scale + n, bias, residual, norm_weight, out, rows, n, k, tl.program_id(0), epsilon,
        x_stride, x_scale_row, weight_stride, scale_stride, residual_stride,
        X_SCALED, NORM, ACTIVATION, BIAS, RESIDUAL, SCALED, PREFETCH, EVEN_N, EVEN_K, ROWS, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
