"""Triton kernels that quantise rows to e4m3 behind a norm or an activation. Importing this file needs Triton.

What is quantised is first rounded to the model's dtype, as if it were a tensor of its own. One program a row.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from rung.passes.kernels.row_kernels import _activate, _sum_of_row


@triton.jit
def _put(values, column, n, row, input_scale, out, scales, scale_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a row, values float32 [BLOCK], 0 from n on. KIND: "static" by a given scale, which is stored for every row;
    "token"; "group" of 128. Row r's scale of group g lies at r + g * scale_stride."""
    if KIND == "group":
        groups = tl.reshape(values, (BLOCK // 128, 128))
        scale = tl.maximum(tl.max(tl.abs(groups), axis=1), 1e-12) / 448.0
        group = tl.arange(0, BLOCK // 128)
        tl.store(scales + row + group * scale_stride, scale, mask=group < n // 128)
        values = tl.reshape(groups / scale[:, None], (BLOCK,))
    else:
        scale = tl.load(input_scale) if KIND == "static" else tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / 448.0
        tl.store(scales + row, scale)
        values = values / scale
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    tl.store(out + row * n + column, values.to(out.dtype.element_ty), mask=column < n)


@triton.jit(do_not_specialize=["scale_stride"])
def quantise_kernel(
    x, up, input_scale, out, scales, n, x_stride, up_stride, scale_stride,
    ACTIVATION: tl.constexpr, KIND: tl.constexpr, PROGRAMMATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows x [rows, n], or with ACTIVATION that of x times up [rows, n], as e4m3 out [rows, n] and scales. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        factor = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
        values = _activate(values, factor, ACTIVATION).to(x.dtype.element_ty).to(tl.float32)
    _put(values, column, n, row, input_scale, out, scales, scale_stride, KIND, BLOCK)


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def add_norm_quantise_kernel(
    x, bias, residual, norm_weight, hidden, input_scale, out, scales, rows, n, epsilon, x_stride, residual_stride, scale_stride,
    PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, PROGRAMMATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`add_norm_kernel` whose normed row goes to out as e4m3 [rows, n], with scales. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = _sum_of_row(
        x, bias, residual, hidden, rows, n, row, column, mask, x_stride, residual_stride, PARTS, BIAS, RESIDUAL, hidden.dtype.element_ty
    )  # fmt: skip
    total *= tl.rsqrt(tl.sum(total * total, axis=0) / n + epsilon)
    scale = tl.load(norm_weight + column, mask=mask, other=0.0).to(tl.float32)
    normed = scale * total.to(hidden.dtype.element_ty).to(tl.float32)
    _put(
        normed.to(hidden.dtype.element_ty).to(tl.float32), column, n, row, input_scale, out, scales, scale_stride, KIND, BLOCK
    )  # fmt: skip
