"""The Triton kernel of attention over pages, or over the flat batch. Like `triton_kernels`, it is imported when it is compiled.

What bounds it: decode the bytes of keys and values, so many loads must be in flight; prefill the matrix units, so a step must cost few
other instructions. Both want the pages of a tile to be known a step ahead, and one page a tile where the block size allows it.
"""
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from rung.attention.backends.triton_kernels import kept_e4m3


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
def _pages(tile, seq_end, table, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr):
    """The page of a tile, or of each of its keys [BLOCK_N]; in the flat batch its first key. Behind the last key its page is repeated."""
    if BLOCK_SIZE == 0:  # the flat batch
        page = seq_end * 0 + tile * BLOCK_N  # a tensor, where the interpreter counts tiles in Python integers
    else:
        index = tile * BLOCK_N if ONE_PAGE else tile * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table + tl.maximum(tl.minimum(index, seq_end - 1), 0) // BLOCK_SIZE)
    return page


@triton.jit
def _place(tile, page, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Where a tile lies in the cache, or each of its keys [BLOCK_N]."""
    if BLOCK_SIZE == 0:
        place = page.to(tl.int64) * slot_stride
    elif ONE_PAGE:
        place = page.to(tl.int64) * block_stride + (tile * BLOCK_N % BLOCK_SIZE) * slot_stride
    else:
        place = page.to(tl.int64) * block_stride + ((tile * BLOCK_N + tl.arange(0, BLOCK_N)) % BLOCK_SIZE) * slot_stride
    return place


@triton.jit
def _load(
    cache, place, tile, seq_end, slot_stride,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keys or values of one tile [BLOCK_N, COLUMNS]. MASKED: those behind the last key are zero, and not read."""
    slot = tl.arange(0, BLOCK_N)
    column = tl.arange(0, COLUMNS)
    if ONE_PAGE:
        pointers = cache + place + (slot[:, None] * slot_stride + column[None, :])
    else:
        pointers = cache + (place[:, None] + column[None, :])
    if MASKED:
        loaded = tl.load(pointers, mask=(tile * BLOCK_N + slot < seq_end)[:, None] & (column < HEAD_SIZE)[None, :], other=0.0)
    elif HEAD_SIZE == COLUMNS:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=(column < HEAD_SIZE)[None, :], other=0.0)
    return loaded


@triton.jit
def _widened(values):
    """e4m3 to float16, four numbers at a time and in the layout in which they were loaded: the multiplication wants keys side by side, and
    would else have each number fetched from shared memory by itself."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r", [values], dtype=tl.float16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def _soften(
    scores, tile, position, scale, soft_cap, highest, total,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022): weights, fade, highest, total."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if HAS_SOFT_CAP:
        squeezed = scores * (scale / soft_cap)
        scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (tl.exp2(squeezed * (2.0 * LOG2E)) + 1.0))
        factor = 1.0
    else:
        factor = scale * LOG2E
    if MASKED:
        index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = index[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - index[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    risen = tl.maximum(highest, tl.max(scores, 1) * factor)
    reference = tl.where(risen == float("-inf"), 0.0, risen) if MASKED else risen
    weights = tl.exp2(scores * factor - reference[:, None])
    fade = tl.exp2(highest - reference)
    return weights, fade, risen, total * fade + tl.sum(weights, 1)


@triton.jit
def _attend(
    first, last, queries, position, seq_end, table, key_cache, value_cache, block_stride, key_slot_stride, value_slot_stride, scale,
    soft_cap, highest, total, sums,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Tiles first to last (exclusive). MASKED: some row may not see some key of a tile."""
    # Pages are loaded a tile ahead and handed on: otherwise the pipeliner gives the block table, of which the addresses depend, stages
    # of the buffers' depth.
    page = _pages(first, seq_end, table, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
    for tile in range(first, last):
        key_place = _place(tile, page, block_stride, key_slot_stride, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
        value_place = _place(tile, page, block_stride, value_slot_stride, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
        keys = _load(key_cache, key_place, tile, seq_end, key_slot_stride, MASKED, BLOCK_SIZE, BLOCK_N, ONE_PAGE, HEAD_SIZE, COLUMNS)
        values = _load(
            value_cache, value_place, tile, seq_end, value_slot_stride, MASKED, BLOCK_SIZE, BLOCK_N, ONE_PAGE, HEAD_SIZE, COLUMNS
        )
        page = _pages(tile + 1, seq_end, table, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        weights, fade, highest, total = _soften(
            scores, tile, position, scale, soft_cap, highest, total, MASKED, BLOCK_N, WINDOW, HAS_SOFT_CAP
        )
        if WIDEN:
            widened = _widened(values)
        else:
            widened = values.to(queries.dtype)
        sums = tl.dot(weights.to(queries.dtype), widened, sums * fade[:, None], input_precision="ieee")
    return highest, total, sums


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "table_stride"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def paged_attention_kernel(
    query,  # [num_tokens, num_heads, HEAD_SIZE]
    out,  # like query
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]; flat: [num_tokens, num_kv_heads, HEAD_SIZE]
    value_cache,
    query_start_loc,  # int32 [num_requests + 1]
    seq_lens,  # int32 [num_requests]
    block_table,  # int32 [num_requests, max_blocks]
    partial_sums,  # float32 [num_tokens, num_heads, splits, HEAD_SIZE], normalised within the split; unused without SPLIT
    partial_scales,  # float32 [num_tokens, num_heads, splits], log2 of the weight of each; -inf for none
    out_scale,  # float32 [1], of an e4m3 out; unused without OUT_SCALED and with SPLIT
    num_tokens,
    num_requests,
    scale,  # of the scores, that of the keys in it
    value_scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    GROUP: tl.constexpr,  # query heads a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # 0: keys and values of this step, in the flat batch, are all there are
    BLOCK_Q: tl.constexpr,  # tokens a program
    BLOCK_M: tl.constexpr,  # rows a program: BLOCK_Q * GROUP of them are used
    BLOCK_N: tl.constexpr,  # keys a step
    COLUMNS: tl.constexpr,  # HEAD_SIZE rounded up to a power of two
    WINDOW: tl.constexpr,  # 0: full attention
    HAS_SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    OUT_SCALED: tl.constexpr,
    WIDEN: tl.constexpr,  # an e4m3 cache beside queries in float16, on a device
    EARLY: tl.constexpr,  # whether the reduction may be launched while this runs (programmatic dependent launch)
):
    """Causal attention of BLOCK_Q tokens of one request, all query heads of one KV head, over one share of the keys.

    Grid: (KV heads, query blocks, splits). Query blocks are counted by `query_blocks` of `launch_plan`; those that no request needs
    leave at once, those of padded rows write zero."""
    ONE_PAGE: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # The last rows of a long prompt see the most keys, so they start first, for all heads.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
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
    if key_cache.dtype.element_ty == tl.float8e4nv and queries.dtype == tl.bfloat16:
        # e4m3 becomes float16 in one instruction for two numbers; to bfloat16 each takes another, at a quarter of the rate.
        queries = tl.minimum(tl.maximum(queries.to(tl.float32), -65504.0), 65504.0).to(tl.float16)

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
    key_cache += kv_head.to(tl.int64) * key_head_stride
    value_cache += kv_head.to(tl.int64) * value_head_stride
    if BLOCK_SIZE == 0:
        key_cache += start.to(tl.int64) * key_slot_stride
        value_cache += start.to(tl.int64) * value_slot_stride
    highest, total, sums = _attend(
        first_tile, seen_by_all, queries, position, seq_end, table, key_cache, value_cache, block_stride, key_slot_stride,
        value_slot_stride, scale, soft_cap, highest, total, sums,
        False, BLOCK_SIZE, BLOCK_N, ONE_PAGE, HEAD_SIZE, COLUMNS, WINDOW, HAS_SOFT_CAP, WIDEN,
    )  # fmt: skip
    highest, total, sums = _attend(
        seen_by_all, last_tile, queries, position, seq_end, table, key_cache, value_cache, block_stride, key_slot_stride,
        value_slot_stride, scale, soft_cap, highest, total, sums,
        True, BLOCK_SIZE, BLOCK_N, ONE_PAGE, HEAD_SIZE, COLUMNS, WINDOW, HAS_SOFT_CAP, WIDEN,
    )  # fmt: skip

    some = total != 0.0  # NaN too: a row that holds one shows it
    result = tl.where(some[:, None], sums / tl.where(some, total, 1.0)[:, None] * value_scale, 0.0)
    if SPLIT:
        splits = tl.num_programs(2)
        place = (token * (tl.num_programs(0) * GROUP) + head) * splits + tl.program_id(2)
        tl.store(partial_scales + place, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=used)
        tl.store(partial_sums + place[:, None] * HEAD_SIZE + column[None, :], result, mask=inside & some[:, None])
    else:
        target = out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + column[None, :]
        if OUT_SCALED:
            result = kept_e4m3(result.to(query.dtype.element_ty).to(tl.float32) / tl.load(out_scale), 1.0)
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
