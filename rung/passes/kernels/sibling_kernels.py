"""Triton kernels of several products of the same rows, with weights that lie apart: queries, keys and values of most models. See
`product_kernels`. Importing this file needs Triton."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from rung.passes.kernels.product_kernels import _product_tile, _vector_tile


@triton.jit
def _sibling_of(
    column_block, first, second, third, first_scale, second_scale, third_scale, first_bias, second_bias, third_bias,
    first_out, second_out, third_out, first_n, second_n, third_n, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(weight, scale, bias, out, n) of the product that a block of columns belongs to, and the block's number among its own."""
    weight, scale, bias, out, n = first, first_scale, first_bias, first_out, first_n
    behind_first = tl.cdiv(first_n, BLOCK_N)
    behind_second = behind_first + tl.cdiv(second_n, BLOCK_N)
    if column_block >= behind_second:
        weight, scale, bias, out, n = third, third_scale, third_bias, third_out, third_n
        column_block -= behind_second
    elif column_block >= behind_first:
        weight, scale, bias, out, n = second, second_scale, second_bias, second_out, second_n
        column_block -= behind_first
    return weight, scale, bias, out, n, column_block


@triton.jit(do_not_specialize=["rows", "m_blocks", "x_scale_row"])
def sibling_products_kernel(
    x, x_scale, first, second, third, first_scale, second_scale, third_scale, first_bias, second_bias, third_bias,
    first_out, second_out, third_out, rows, first_n, second_n, third_n, k, m_blocks, x_stride, x_scale_row,
    SCALED: tl.constexpr, BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Three products [rows, n] = x [rows, k] @ weight.T with contiguous weights [n, k]. SCALED: e4m3 rows with a scale
    each, or one for all, and e4m3 weights with one for each output. Grid: (blocks of all n * blocks of rows)."""
    block = tl.program_id(0)
    column_block = block // m_blocks
    weight, scale, bias, out, n, column_block = _sibling_of(
        column_block, first, second, third, first_scale, second_scale, third_scale, first_bias, second_bias, third_bias,
        first_out, second_out, third_out, first_n, second_n, third_n, BLOCK_N,
    )  # fmt: skip
    _product_tile(
        x, x_scale, weight, weight, scale, scale, bias, x, out, rows, n, k, block % m_blocks, column_block,
        x_stride, x_scale_row, 0, k, 0, 0,
        SCALED, "", BIAS, False, 1, 1 if SCALED else 0, EVEN_N, EVEN_K, SWAP, PREFETCH, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def sibling_vectors_kernel(
    x, x_scale, first, second, third, first_scale, second_scale, third_scale, first_bias, second_bias, third_bias,
    first_out, second_out, third_out, first_n, second_n, third_n, k,
    SCALED: tl.constexpr, BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PREFETCH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`sibling_products_kernel` for one row. Grid: (blocks of all n)."""
    column_block = tl.program_id(0)
    weight, scale, bias, out, n, column_block = _sibling_of(
        column_block, first, second, third, first_scale, second_scale, third_scale, first_bias, second_bias, third_bias,
        first_out, second_out, third_out, first_n, second_n, third_n, BLOCK_N,
    )  # fmt: skip
    _vector_tile(
        x, x_scale, weight, weight, scale, scale, bias, x, x, out, n, k, column_block, 0.0, k, 0,
        SCALED, False, "", BIAS, False, 1 if SCALED else 0, PREFETCH, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
