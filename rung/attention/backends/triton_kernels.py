"""The Triton kernels around attention: the cache write, the reduction of split keys, the zeroing of padded rows. Importing this file needs
Triton; `triton_paged` names it to its launchers, which import it when they compile.

Counts that change from step to step are never specialised on; strides are, because they are fixed for a model and widen the loads.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept_e4m3(values, factor):
    """What an e4m3 cache keeps of values: they are float32, times `factor`, and not beyond 448."""
    return tl.minimum(tl.maximum(values.to(tl.float32) * factor, -448.0), 448.0)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kv_kernel(
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_SIZE]
    value,
    key_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE]
    value_cache,
    slot_mapping,  # int64 [num_tokens]
    key_factor,  # 1 / scale, where SCALED
    value_factor,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    SCALED: tl.constexpr,  # whether the cache is e4m3
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # heads a program copies
    COLUMNS: tl.constexpr,  # HEAD_SIZE rounded up to a power of two
):
    """Copies HEADS heads of one token to its slot; a negative slot copies nothing. Grid: (num_tokens, groups of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < NUM_KV_HEADS) & (column < HEAD_SIZE)
    target = (slot // BLOCK_SIZE) * cache_block_stride + (slot % BLOCK_SIZE) * cache_slot_stride + head * cache_head_stride + column
    new_key = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask=inside)
    new_value = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask=inside)
    if SCALED:
        new_key = kept_e4m3(new_key, key_factor)
        new_value = kept_e4m3(new_value, value_factor)
    tl.store(key_cache + target, new_key.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(value_cache + target, new_value.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def reduce_splits_kernel(
    out,  # [num_tokens, num_heads, HEAD_SIZE]
    partial_sums,  # float32 [num_tokens, num_heads, splits, HEAD_SIZE]
    partial_scales,  # float32 [num_tokens, num_heads, splits]
    query,  # for its dtype, to which the result is rounded before it becomes e4m3
    out_scale,  # float32 [1], of an e4m3 out; unused without OUT_SCALED
    splits,
    out_token_stride,
    out_head_stride,
    OUT_SCALED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # splits rounded up to a power of two
    STEP: tl.constexpr,  # splits summed at once
    EARLY: tl.constexpr,  # launched before the kernel in front has ended (programmatic dependent launch)
):
    """Joins the shares of one head of one token; a row without any becomes zero. Grid: (num_tokens, num_heads)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = (token * tl.num_programs(1) + head) * splits
    column = tl.arange(0, COLUMNS)
    every = tl.arange(0, MAX_SPLITS)
    highest = tl.max(tl.load(partial_scales + place + every, mask=every < splits, other=float("-inf")), 0)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    total = 0.0
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        scales = tl.load(partial_scales + place + split, mask=split < splits, other=float("-inf"))
        weights = tl.exp2(scales - reference)
        # An empty share wrote no sums, so what stands there is not read.
        there = (scales > float("-inf"))[:, None] & (column < HEAD_SIZE)[None, :]
        shares = tl.load(partial_sums + (place + split)[:, None] * HEAD_SIZE + column[None, :], mask=there, other=0.0)
        total += tl.sum(weights, 0)
        sums += tl.sum(weights[:, None] * shares, 0)
    result = sums / tl.where(total > 0.0, total, 1.0)
    target = out + token * out_token_stride + head * out_head_stride + column
    if OUT_SCALED:
        result = kept_e4m3(result.to(query.dtype.element_ty).to(tl.float32) / tl.load(out_scale), 1.0)
    tl.store(target, result.to(out.dtype.element_ty), mask=column < HEAD_SIZE)


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["query_start_loc"])
def zero_padded_rows_kernel(
    out,  # [num_tokens, num_heads, head size], each row contiguous
    query_start_loc,  # int32 [num_requests + 1]
    num_requests,
    out_token_stride,
    ROW: tl.constexpr,  # elements of a row
    STEP: tl.constexpr,
):
    """Zeroes the rows behind the last request. Grid: (num_tokens,)."""
    token = tl.program_id(0)
    if token < tl.load(query_start_loc + num_requests):
        return
    target = out + token.to(tl.int64) * out_token_stride
    for first in range(0, ROW, STEP):
        column = first + tl.arange(0, STEP)
        tl.store(target + column, tl.zeros([STEP], out.dtype.element_ty), mask=column < ROW)
