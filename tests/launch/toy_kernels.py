"""Small Triton kernels; importing this needs Triton."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["x"])
def scale_kernel(x, out, count, stride, factor, BLOCK: tl.constexpr):
    """out[i] = x[i * stride] * factor. Grid: blocks of `count`."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + item * stride, mask=item < count).to(tl.float32)
    tl.store(out + item, (value * factor).to(out.dtype.element_ty), mask=item < count)


@triton.jit
def annotated_kernel(x, factor: tl.float32):
    tl.store(x, factor)


@triton.jit
def many_kernel(
    a, b, c, d, e, f, g, h, out, count, s0, s1, s2, s3, s4, s5, s6, s7, factor, soft, BLOCK: tl.constexpr
):  # fmt: skip
    """Twenty parameters. Grid: blocks of `count`."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = item < count
    total = tl.load(a + item * s0, mask=mask) + tl.load(b + item * s1, mask=mask) + tl.load(c + item * s2, mask=mask)
    total += tl.load(d + item * s3, mask=mask) + tl.load(e + item * s4, mask=mask) + tl.load(f + item * s5, mask=mask)
    total += tl.load(g + item * s6, mask=mask) + tl.load(h + item * s7, mask=mask)
    tl.store(out + item, total * factor + soft, mask=mask)


@triton.jit
def add_kernel(x, out, count, BLOCK: tl.constexpr):
    """out += x. Grid: blocks of `count`."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = item < count
    tl.store(out + item, tl.load(out + item, mask=mask) + tl.load(x + item, mask=mask), mask=mask)
