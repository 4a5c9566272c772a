"""The Triton kernels of paged attention. Importing this file needs Triton; `triton_paged` names it to its launchers, which import it
when they compile.

Lengths are read on the device, so one compiled kernel and one launch shape serve every batch of a captured size. Counts that change
from step to step are never specialised on; strides are, because they are fixed for a model and widen the loads.
"""
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kv_kernel(
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_SIZE]
    value,
    key_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE]
    value_cache,
    slot_mapping,  # int64 [num_tokens]
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
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
    tl.store(key_cache + target, new_key.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(value_cache + target, new_value.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit
def _request_of_block(query_start_loc, num_requests, block, BLOCK_Q: tl.constexpr):
    """The request that owns query block `block`, and its first block. Padded rows count as a request behind the last one.

    Request i starts at block start[i] // BLOCK_Q + i: never later than its rows need, and increasing. With one row a block the rows
    themselves are the blocks."""
    SPARE: tl.constexpr = 0 if BLOCK_Q == 1 else 1
    low = 0
    high = num_requests
    if BLOCK_Q == 1:
        # A steady decode batch has request i in row i: asking that first spares the dependent loads of the search.
        guess = tl.minimum(block, num_requests)
        follows = tl.load(query_start_loc + guess + 1, mask=guess < num_requests, other=block + 1)
        if (tl.load(query_start_loc + guess) == block) & (follows == block + 1):
            low = guess
            high = guess
        elif tl.load(query_start_loc + num_requests) <= block:
            low = num_requests
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle * SPARE <= block:
            low = middle
        else:
            high = middle - 1
    return low, tl.load(query_start_loc + low) // BLOCK_Q + low * SPARE


@triton.jit
def _attend_tile(
    tile,
    queries,  # [BLOCK_M, COLUMNS]
    position,  # [BLOCK_M], position of each row in its request
    seq_end,  # keys from here on do not exist
    table,  # this request's row of the block table
    key_cache,  # offset to the KV head
    value_cache,
    cache_block_stride,
    cache_slot_stride,
    scale,
    soft_cap,
    highest,  # [BLOCK_M], running maximum of the scores, base 2
    total,  # [BLOCK_M], running sum of the weights
    sums,  # [BLOCK_M, COLUMNS], running sum of the weighted values
    MASKED: tl.constexpr,  # whether some row may not see some key of the tile
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """One step of the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) over BLOCK_N keys."""
    LOG2E: tl.constexpr = 1.4426950408889634
    index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, COLUMNS)
    if MASKED:
        page = tl.load(table + index // BLOCK_SIZE, mask=index < seq_end, other=0).to(tl.int64)
    else:
        page = tl.load(table + index // BLOCK_SIZE).to(tl.int64)
    place = page * cache_block_stride + (index % BLOCK_SIZE) * cache_slot_stride
    offsets = place[:, None] + column[None, :]
    # Slots behind the last key may hold NaN, and 0 * NaN is NaN: they are not loaded at all.
    if MASKED:
        there = (index < seq_end)[:, None] & (column < HEAD_SIZE)[None, :]
        keys = tl.load(key_cache + offsets, mask=there, other=0.0)
        values = tl.load(value_cache + offsets, mask=there, other=0.0)
    elif HEAD_SIZE == COLUMNS:
        keys = tl.load(key_cache + offsets)
        values = tl.load(value_cache + offsets)
    else:
        keys = tl.load(key_cache + offsets, mask=(column < HEAD_SIZE)[None, :], other=0.0)
        values = tl.load(value_cache + offsets, mask=(column < HEAD_SIZE)[None, :], other=0.0)

    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if HAS_SOFT_CAP:
        squeezed = scores * (scale / soft_cap)
        scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (tl.exp2(squeezed * (2.0 * LOG2E)) + 1.0))
    else:
        scores = scores * (scale * LOG2E)
    if MASKED:
        visible = index[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - index[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

    risen = tl.maximum(highest, tl.max(scores, 1))
    reference = tl.where(risen == float("-inf"), 0.0, risen) if MASKED else risen
    weights = tl.exp2(scores - reference[:, None])
    fade = tl.exp2(highest - reference)
    total = total * fade + tl.sum(weights, 1)
    sums = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), sums * fade[:, None], input_precision="ieee")
    return risen, total, sums


@triton.jit(do_not_specialize=["num_tokens", "num_requests"], do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"])
def paged_attention_kernel(
    query,  # [num_tokens, num_heads, HEAD_SIZE]
    out,  # like query
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    value_cache,
    query_start_loc,  # int32 [num_requests + 1]
    seq_lens,  # int32 [num_requests]
    block_table,  # int32 [num_requests, max_blocks]
    partial_sums,  # float32 [num_tokens, num_heads, splits, HEAD_SIZE], normalised within the split; unused without SPLIT
    partial_scales,  # float32 [num_tokens, num_heads, splits], log2 of the weight of each; -inf for none
    num_tokens,
    num_requests,
    scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    table_stride,
    GROUP: tl.constexpr,  # query heads a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # tokens a program
    BLOCK_M: tl.constexpr,  # rows a program: BLOCK_Q * GROUP of them are used
    BLOCK_N: tl.constexpr,  # keys a step
    COLUMNS: tl.constexpr,  # HEAD_SIZE rounded up to a power of two
    WINDOW: tl.constexpr,  # 0: full attention
    HAS_SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Causal attention of BLOCK_Q tokens of one request, all query heads of one KV head, over one share of the keys.

    Grid: (query blocks, KV heads, splits). Query blocks are counted by `query_blocks` of `triton_paged`; those that no request needs
    leave at once, those of padded rows write zero."""
    # The last rows of a long prompt see the most keys, so they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first_block = _request_of_block(query_start_loc, num_requests, block, BLOCK_Q)
    real = request < num_requests
    start = tl.load(query_start_loc + request)
    stop = tl.load(query_start_loc + request + 1, mask=real, other=num_tokens)
    first_row = start + (block - first_block) * BLOCK_Q
    if first_row >= stop:
        return
    seq_len = tl.load(seq_lens + request, mask=real, other=0)
    first_position = seq_len - (stop - first_row)  # of the first token
    seq_end = tl.minimum(seq_len, first_position + BLOCK_Q)

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, COLUMNS)
    token = first_row + row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = first_position + row // GROUP
    used = (row < BLOCK_Q * GROUP) & (token < stop)
    inside = used[:, None] & (column < HEAD_SIZE)[None, :]
    token = token.to(tl.int64)
    queries = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + column[None, :], mask=inside, other=0.0
    )

    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
    last_tile = tl.cdiv(tl.maximum(seq_end, 0), BLOCK_N)
    if SPLIT:
        share = tl.cdiv(last_tile - first_tile, tl.num_programs(2))
        first_tile = first_tile + tl.program_id(2) * share
        last_tile = tl.minimum(first_tile + share, last_tile)
    if WINDOW > 0:
        seen_by_all = first_tile
    else:
        seen_by_all = tl.minimum(tl.maximum(tl.maximum(first_position + 1, 0) // BLOCK_N, first_tile), last_tile)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    key_cache += kv_head.to(tl.int64) * cache_head_stride
    value_cache += kv_head.to(tl.int64) * cache_head_stride
    for tile in range(first_tile, seen_by_all):
        highest, total, sums = _attend_tile(
            tile, queries, position, seq_end, table, key_cache, value_cache, cache_block_stride, cache_slot_stride, scale, soft_cap,
            highest, total, sums, False, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, COLUMNS, WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
    for tile in range(seen_by_all, last_tile):
        highest, total, sums = _attend_tile(
            tile, queries, position, seq_end, table, key_cache, value_cache, cache_block_stride, cache_slot_stride, scale, soft_cap,
            highest, total, sums, True, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, COLUMNS, WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip

    some = total > 0.0
    result = tl.where(some[:, None], sums / tl.where(some, total, 1.0)[:, None], 0.0)
    if SPLIT:
        splits = tl.num_programs(2)
        place = (token * (tl.num_programs(1) * GROUP) + head) * splits + tl.program_id(2)
        tl.store(partial_scales + place, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=used)
        tl.store(partial_sums + place[:, None] * HEAD_SIZE + column[None, :], result, mask=inside & some[:, None])
    else:
        target = out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def reduce_splits_kernel(
    out,  # [num_tokens, num_heads, HEAD_SIZE]
    partial_sums,  # float32 [num_tokens, num_heads, splits, HEAD_SIZE]
    partial_scales,  # float32 [num_tokens, num_heads, splits]
    splits,
    out_token_stride,
    out_head_stride,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # splits rounded up to a power of two
    STEP: tl.constexpr,  # splits summed at once
):
    """Joins the shares of one head of one token; a row without any becomes zero. Grid: (num_tokens, num_heads)."""
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
