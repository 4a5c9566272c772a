"""Triton kernels of what stands between two products when it is not part of one: the sum and the norm of rows, and the activation.
Importing this file needs Triton.

With PROGRAMMATIC a kernel is launched programmatically: it may start while its predecessor runs, and waits before anything else.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    """silu(gate) * up for "silu", gelu(gate) * up with the tanh approximation for "gelu"; float32."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner))) * up


@triton.jit
def _sum_of_row(
    x, bias, residual, hidden, rows, n, row, column, mask, x_stride, residual_stride,
    PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """x + residual of a row, float32 [BLOCK], rounded to DTYPE and with RESIDUAL stored in hidden; see `add_norm_kernel`."""
    if PARTS > 1:
        total = tl.load(x + row * n + column, mask=mask, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(x + (part * rows.to(tl.int64) + row) * n + column, mask=mask, other=0.0)
        if BIAS:
            total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        total = total.to(DTYPE).to(tl.float32)
    else:
        total = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(hidden.dtype.element_ty)
        tl.store(hidden + row * n + column, rounded, mask=mask)
        total = rounded.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def add_norm_kernel(
    x, bias, residual, norm_weight, hidden, normed, rows, n, epsilon, x_stride, residual_stride,
    PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PROGRAMMATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden = x + residual and normed = norm_weight * hidden / rms(hidden) of one row, both [rows, n] and contiguous. Without RESIDUAL
    hidden is x and not written. With PARTS > 1 x is float32 [PARTS, rows, n], summed in order. A sum of parts is given its bias and rounded
    before the residual is added. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < n
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scale = tl.load(norm_weight + column, mask=mask, other=0.0).to(tl.float32)
    total = _sum_of_row(
        x, bias, residual, hidden, rows, n, row, column, mask, x_stride, residual_stride, PARTS, BIAS, RESIDUAL, normed.dtype.element_ty
    )  # fmt: skip
    total *= tl.rsqrt(tl.sum(total * total, axis=0) / n + epsilon)
    scaled = scale * total.to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + row * n + column, scaled.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def activate_kernel(
    gate, up, out, n, gate_stride, up_stride, ACTIVATION: tl.constexpr, PROGRAMMATIC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The activation of gate [rows, n] times up [rows, n] into out [rows, n], contiguous. Grid: (rows, blocks of n)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, _activate(first, second, ACTIVATION).to(out.dtype.element_ty), mask=mask)
