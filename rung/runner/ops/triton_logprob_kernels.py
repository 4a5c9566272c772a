"""The Triton kernels of log-probabilities. Importing this file needs Triton."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from rung.runner.ops.triton_filter_kernels import ordered

NOTHING = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize_on_alignment=["token_ids", "bests", "sums"])
def logprob_chunk_kernel(
    logits, token_ids, bests, sums, ranks, tops, vocab, logits_stride, num_chunks, CHUNK: tl.constexpr, TOP: tl.constexpr
):
    """Of one chunk of a row: its best score, the sum of exponentials below it, how many tokens are at least as likely as the row's own,
    and its TOP best tokens as numbers that no two tokens share: the score's key, then the id from the end. Grid: (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * logits_stride
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    score = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    own = tl.load(logits + tl.load(token_ids + row)).to(tl.float32)
    best = tl.max(score, axis=0)
    place = row * num_chunks + chunk
    tl.store(bests + place, best)
    tl.store(sums + place, tl.sum(tl.exp(score - tl.where(best == float("-inf"), 0.0, best)), axis=0))
    tl.store(ranks + place, tl.sum((inside & (score >= own)).to(tl.int32), axis=0))
    if TOP > 0:
        number = (ordered(score).to(tl.int64) << 32) | (vocab - 1 - token).to(tl.int64)
        number = tl.where(inside, number, NOTHING)
        for at in range(TOP):
            largest = tl.max(number, axis=0)
            tl.store(tops + place * TOP + at, largest)
            number = tl.where(number == largest, NOTHING, number)


@triton.jit(do_not_specialize_on_alignment=["token_ids", "bests", "sums"])
def logprob_row_kernel(
    logits, token_ids, bests, sums, ranks, tops, out_logprobs, out_ranks, out_ids, out_top_logprobs, vocab, logits_stride, num_chunks,
    CHUNKS: tl.constexpr, TOP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """A row from its chunks. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    chunk = tl.arange(0, CHUNKS)
    known = chunk < num_chunks
    best_of = tl.load(bests + row * num_chunks + chunk, mask=known, other=float("-inf"))
    sum_of = tl.load(sums + row * num_chunks + chunk, mask=known, other=0.0)
    best = tl.max(best_of, axis=0)
    total = best + tl.log(tl.sum(sum_of * tl.exp(best_of - tl.where(best == float("-inf"), 0.0, best)), axis=0))
    own = tl.load(logits + tl.load(token_ids + row)).to(tl.float32)
    tl.store(out_logprobs + row, own - total)
    tl.store(out_ranks + row, tl.sum(tl.load(ranks + row * num_chunks + chunk, mask=known, other=0), axis=0).to(tl.int64))
    if TOP > 0:
        candidate = tl.arange(0, CANDIDATES)
        count = num_chunks * TOP
        number = tl.load(tops + row * count + candidate, mask=candidate < count, other=NOTHING)
        for at in range(TOP):
            largest = tl.max(number, axis=0)
            token = vocab - 1 - (largest & 0xFFFFFFFF)
            tl.store(out_ids + row * TOP + at, token)
            tl.store(out_top_logprobs + row * TOP + at, tl.load(logits + token).to(tl.float32) - total)
            number = tl.where(number == largest, NOTHING, number)
