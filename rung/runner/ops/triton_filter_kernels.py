"""The Triton kernel of min-p, top-k and top-p. Importing this file needs Triton.

A program has one row and sorts nothing. It looks for the least key that stays, a key being the bits of a score as an integer in the order
of the scores: each pass over the row weighs the tokens above a few thresholds and keeps the interval in between that holds the answer,
until few tokens lie in it; these are copied together and searched in the same way. Weights are counts for top-k and masses for top-p,
both whole numbers, so no order of summation matters.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MASS_UNITS = tl.constexpr(17592186044416.0)  # of `sampler.filters`
LOWEST = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def ordered(value):
    """int32 in the order of float32 values; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mass(key, best):
    """int64 mass of tokens by their keys, 0 for -inf."""
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    is_best = value == best  # which may be infinite
    weight = tl.exp(tl.where(is_best, 0.0, value) - tl.where(is_best, 0.0, best))
    return (tl.where(key == LOWEST, 0.0, weight) * MASS_UNITS).to(tl.int64)


@triton.jit
def _keys(scores, token, temperature, VOCAB: tl.constexpr):
    """Keys at the temperature; that of -inf for NaN and behind the vocabulary."""
    value = tl.load(scores + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    value = tl.math.div_rn(value, temperature)
    return ordered(tl.where(value == value, value, float("-inf")))


@triton.jit
def _search(
    scores, room, temperature, best, low, high, above, inside, needed,
    MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high) from which on upwards the weight is at least `needed`, else `low`. `above` is the weight from `high`
    on, `inside` (or more) tokens are in the interval. Returns the key, the weight above it, and how many tokens have it (or more)."""
    way = tl.arange(0, WAYS)
    while (high - low > 1) & (inside > ROOM):
        step = (high - low + WAYS - 1) // WAYS
        limits = tl.minimum(low + way * step, high)
        limits_32 = limits.to(tl.int32)[:, None]
        weights = tl.zeros([WAYS], tl.int64)
        counts = tl.zeros([WAYS], tl.int32)
        behind = tl.zeros([], tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            key = _keys(scores, start + tl.arange(0, BLOCK), temperature, VOCAB)
            over = key[None, :] >= limits_32
            counts += tl.sum(over.to(tl.int32), axis=1)
            behind += tl.sum((key >= high).to(tl.int32), axis=0)
            if MASS:
                weights += tl.sum(tl.where(over, _mass(key, best)[None, :], 0), axis=1)
        if not MASS:
            weights = counts.to(tl.int64)
        chosen = tl.maximum(tl.sum((weights >= needed).to(tl.int32), axis=0) - 1, 0)
        is_last = chosen == WAYS - 1
        next_count = tl.where(is_last, behind, tl.sum(tl.where(way == chosen + 1, counts, 0), axis=0))
        next_weight = tl.where(is_last, above, tl.sum(tl.where(way == chosen + 1, weights, 0), axis=0))
        inside = (tl.sum(tl.where(way == chosen, counts, 0), axis=0) - next_count).to(tl.int64)
        above = next_weight
        old_low = low
        low = tl.minimum(old_low + chosen * step, high - 1)
        high = tl.minimum(old_low + (chosen + 1) * step, high)
    if high - low > 1:
        found = tl.zeros([], tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            key = _keys(scores, start + tl.arange(0, BLOCK), temperature, VOCAB)
            taken = ((key >= low) & (key < high)).to(tl.int32)
            tl.store(room + found + tl.cumsum(taken, axis=0) - 1, key, mask=taken != 0)
            found += tl.sum(taken, axis=0)
        tl.debug_barrier()
        place = tl.arange(0, ROOM)
        key = tl.load(room + place, mask=place < found, other=LOWEST)
        if MASS:
            weight = tl.where(place < found, _mass(key, best), 0)
        else:
            weight = (place < found).to(tl.int64)
        while high - low > 1:
            step = (high - low + WAYS - 1) // WAYS
            limits = tl.minimum(low + way * step, high)[:, None]
            reached = above + tl.sum(tl.where(key[None, :] >= limits, weight[None, :], 0), axis=1)
            chosen = tl.maximum(tl.sum((reached >= needed).to(tl.int32), axis=0) - 1, 0)
            old_low = low
            low = tl.minimum(old_low + chosen * step, high - 1)
            high = tl.minimum(old_low + (chosen + 1) * step, high)
        above += tl.sum(tl.where(key > low, weight, 0), axis=0)
        inside = tl.sum(((key == low) & (place < found)).to(tl.int64), axis=0)
        tl.debug_barrier()
    return low, above, inside


@triton.jit(do_not_specialize_on_alignment=["idx_mapping", "temperatures", "log_min_ps", "top_ks", "top_ps"])
def filter_kernel(
    scores, idx_mapping, temperatures, log_min_ps, top_ks, top_ps, out, room, scores_stride, out_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The scores that a row's filters keep, and -inf. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(idx_mapping + row), 0)
    temperature = tl.load(temperatures + slot)
    log_min_p = tl.load(log_min_ps + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    scores += row * scores_stride
    out += row * out_stride
    room += row * ROOM
    # Kept are keys above `least`, and of those that equal it the first `ties`.
    least = tl.full([], LOWEST, tl.int64)
    ties = tl.full([], VOCAB, tl.int64)
    equal = tl.full([], VOCAB, tl.int64)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))):
        best_key = tl.full([], LOWEST, tl.int32)
        worst_key = tl.full([], 0x7FFFFFFF, tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            key = _keys(scores, start + tl.arange(0, BLOCK), temperature, VOCAB)
            best_key = tl.maximum(best_key, tl.max(key, axis=0))
            worst_key = tl.minimum(worst_key, tl.min(tl.where(key == LOWEST, 0x7FFFFFFF, key), axis=0))
        best = (best_key ^ ((best_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        has_min_p = log_min_p > float("-inf")
        least_likely = tl.where(has_min_p, ordered(best + tl.where(has_min_p, log_min_p, 0.0)), LOWEST)
        least = tl.maximum(tl.minimum(worst_key, best_key), least_likely).to(tl.int64)
        high = best_key.to(tl.int64) + 1
        if top_k > 0:
            least, above, equal = _search(
                scores, room, temperature, best, least, high, tl.zeros([], tl.int64), equal, top_k, False, VOCAB, BLOCK, ROOM, WAYS
            )  # fmt: skip
            ties = top_k - above
        if top_p < 1.0:
            above_mass = tl.zeros([], tl.int64)
            above = tl.zeros([], tl.int64)
            equal = tl.zeros([], tl.int64)
            for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
                key = _keys(scores, start + tl.arange(0, BLOCK), temperature, VOCAB)
                above_mass += tl.sum(tl.where(key > least, _mass(key, best), 0), axis=0)
                above += tl.sum((key > least).to(tl.int32), axis=0)
                equal += tl.sum((key == least).to(tl.int32), axis=0)
            total = above_mass + tl.minimum(ties, equal) * _mass(least.to(tl.int32), best)
            needed = tl.maximum(tl.math.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            floor = least
            least, above_mass, equal = _search(
                scores, room, temperature, best, least, high, tl.zeros([], tl.int64), above + equal, needed,
                True, VOCAB, BLOCK, ROOM, WAYS,
            )  # fmt: skip
            mass = tl.maximum(_mass(least.to(tl.int32), best), 1)
            by_mass = (needed - above_mass + mass - 1) // mass
            ties = tl.where(least == floor, tl.minimum(ties, by_mass), by_mass)
    seen = tl.zeros([], tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(scores + token, mask=token < VOCAB, other=0.0).to(tl.float32)
        value = tl.math.div_rn(score, tl.where(temperature > 0.0, temperature, 1.0))
        key = ordered(value)
        keep = (key >= least) | (value != value)
        if ties < equal:
            same = ((key == least) & (token < VOCAB)).to(tl.int32)
            keep &= (same == 0) | (seen + tl.cumsum(same, axis=0) <= ties)
            seen += tl.sum(same, axis=0)
        tl.store(out + token, tl.where(keep, score, float("-inf")), mask=token < VOCAB)
