"""The Triton kernel of the grammar mask. Importing this file needs Triton."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton.language as tl

from rung.runner.ops.triton_step_kernels import unspecialised


@unspecialised
def bitmask_kernel(logits, bits, bits_rows, vocab, logits_stride, bits_stride, WORDS: tl.constexpr):
    """WORDS words of one row; a row without a mask ends at once. Grid: (rows, blocks of words)."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(bits_rows + row).to(tl.int64)
    if source >= 0:
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        packed = tl.load(bits + source * bits_stride + word, mask=word * 32 < vocab, other=-1)
        bit = tl.arange(0, 32)
        token = word[:, None] * 32 + bit[None, :]
        forbidden = ((packed[:, None] >> bit[None, :]) & 1) == 0
        # Only forbidden tokens are written: most masks of a grammar forbid nearly all, or nearly none.
        minus_infinity = tl.full((WORDS, 32), float("-inf"), tl.float32)
        tl.store(logits + row * logits_stride + token, minus_infinity, mask=forbidden & (token < vocab))
