"""The Triton kernel that rotates queries and keys and writes the cache. Importing this file needs Triton; `rotary_write` names it to its
launcher.
"""
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from rung.attention.backends.triton_kernels import kept_e4m3


@triton.jit
def _factor(x_first, x_second, x_rest, epsilon, HEAD_SIZE: tl.constexpr):
    """1 / RMS of each head; what lies outside of a head is 0. [HEADS, 1]"""
    squares = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1) + tl.sum(x_rest * x_rest, 1)
    return tl.rsqrt(squares / HEAD_SIZE + epsilon)[:, None]


@triton.jit
def _turned(
    x,  # to the first head of the token
    weight,  # [HEAD_SIZE], unused without NORM
    head,  # [HEADS, 1]
    head_stride,
    heads_end,
    cos,  # [1, HALF_COLUMNS], float32
    sin,
    epsilon,
    offset,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads of one token, normalised and rotated in float32: the two rotated halves and what is not rotated."""
    half = tl.arange(0, HALF_COLUMNS)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_COLUMNS)[None, :]
    in_half = (head < heads_end) & (half < HALF)
    in_rest = (head < heads_end) & (rest < HEAD_SIZE)
    start = x + head * head_stride
    first = tl.load(start + half, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + half, mask=in_half, other=0.0).to(tl.float32)
    remains = tl.load(start + rest, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        factor = _factor(first, second, remains, epsilon, HEAD_SIZE)
        first = first * factor * (tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32) + offset)
        second = second * factor * (tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32) + offset)
        remains = remains * factor * (tl.load(weight + rest, mask=rest < HEAD_SIZE, other=0.0).to(tl.float32) + offset)
    return first * cos - second * sin, second * cos + first * sin, remains


@triton.jit
def _store(
    target,  # [HEADS, 1], to each head
    head,
    heads_end,
    first,
    second,
    remains,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
):
    half = tl.arange(0, HALF_COLUMNS)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_COLUMNS)[None, :]
    in_half = (head < heads_end) & (half < HALF)
    element = target.dtype.element_ty
    tl.store(target + half, first.to(element), mask=in_half)
    tl.store(target + HALF + half, second.to(element), mask=in_half)
    if HEAD_SIZE > 2 * HALF:
        tl.store(target + rest, remains.to(element), mask=(head < heads_end) & (rest < HEAD_SIZE))


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def rotate_and_write_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_SIZE]
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_SIZE]
    value,
    rotated,  # like query
    key_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE]
    value_cache,
    cos,  # [num_tokens, HALF]
    sin,
    query_weight,  # [HEAD_SIZE], unused without NORM
    key_weight,
    slot_mapping,  # int64 [num_tokens]
    epsilon,
    offset,  # added to the weights
    key_factor,  # 1 / scale, where SCALED
    value_factor,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    rotated_token_stride,
    rotated_head_stride,
    cos_token_stride,
    sin_token_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # pairs of a head that are rotated
    HALF_COLUMNS: tl.constexpr,  # HALF rounded up to a power of two
    REST_COLUMNS: tl.constexpr,  # elements of a head that are not rotated, rounded up to a power of two
    HEADS: tl.constexpr,  # heads a program
    NORM: tl.constexpr,
    SCALED: tl.constexpr,  # whether the cache is e4m3
    EARLY: tl.constexpr,  # launched before the kernel in front has ended, and lets the next one start (programmatic dependent launch)
):
    """One token a program in x; in y groups of HEADS query heads, then groups of HEADS KV heads. A negative slot: the rotated query is
    zero, nothing goes to the cache."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    half = tl.arange(0, HALF_COLUMNS)[None, :]
    cosine = tl.load(cos + token * cos_token_stride + half, mask=half < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * sin_token_stride + half, mask=half < HALF, other=0.0).to(tl.float32)
    if group < QUERY_GROUPS:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        first, second, remains = _turned(
            query + token * query_token_stride, query_weight, head, query_head_stride, NUM_HEADS, cosine, sine, epsilon, offset,
            HEAD_SIZE, HALF, HALF_COLUMNS, REST_COLUMNS, NORM,
        )  # fmt: skip
        # A padded row may hold NaN: it is replaced, not weighted.
        first, second = tl.where(slot >= 0, first, 0.0), tl.where(slot >= 0, second, 0.0)
        remains = tl.where(slot >= 0, remains, 0.0)
        target = rotated + token * rotated_token_stride + head * rotated_head_stride
        _store(target, head, NUM_HEADS, first, second, remains, HEAD_SIZE, HALF, HALF_COLUMNS, REST_COLUMNS)
    elif slot >= 0:
        head = (group - QUERY_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]
        first, second, remains = _turned(
            key + token * key_token_stride, key_weight, head, key_head_stride, NUM_KV_HEADS, cosine, sine, epsilon, offset,
            HEAD_SIZE, HALF, HALF_COLUMNS, REST_COLUMNS, NORM,
        )  # fmt: skip
        if SCALED:
            first, second = kept_e4m3(first, key_factor), kept_e4m3(second, key_factor)
            remains = kept_e4m3(remains, key_factor)
        place = (slot // BLOCK_SIZE) * cache_block_stride + (slot % BLOCK_SIZE) * cache_slot_stride + head * cache_head_stride
        _store(key_cache + place, head, NUM_KV_HEADS, first, second, remains, HEAD_SIZE, HALF, HALF_COLUMNS, REST_COLUMNS)
        source = value + token * value_token_stride + head * value_head_stride
        rest = 2 * HALF + tl.arange(0, REST_COLUMNS)[None, :]
        in_half = (head < NUM_KV_HEADS) & (half < HALF)
        first = tl.load(source + half, mask=in_half, other=0.0)
        second = tl.load(source + HALF + half, mask=in_half, other=0.0)
        remains = tl.load(source + rest, mask=(head < NUM_KV_HEADS) & (rest < HEAD_SIZE), other=0.0)
        if SCALED:
            first, second = kept_e4m3(first, value_factor), kept_e4m3(second, value_factor)
            remains = kept_e4m3(remains, value_factor)
        _store(value_cache + place, head, NUM_KV_HEADS, first, second, remains, HEAD_SIZE, HALF, HALF_COLUMNS, REST_COLUMNS)
