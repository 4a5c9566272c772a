"""The Triton kernels of a step. Importing this file needs Triton; `triton_ops` names it to its launchers, which import it when they
compile.

Every count and length is either read on the device or passed unspecialised, so each kernel compiles once for a runner. Row r belongs to
the request whose range in `query_start_loc` holds it, found by a binary search; `num_slots` is R, and 2 ** SEARCH_STEPS is above it.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def specialised_on(*names: str) -> Callable[[Any], Any]:
    """A kernel that is specialised on these arguments alone: where the number of bytes a load takes follows from them."""

    def decorated(function):
        parameters = inspect.signature(function).parameters.values()
        others = [p.name for p in parameters if "constexpr" not in str(p.annotation) and p.name not in names]
        return triton.jit(do_not_specialize=others)(function)

    return decorated


def unspecialised(function):
    """A kernel that is specialised on no argument, neither on its value nor on the alignment of its address: too small to gain from it."""
    return specialised_on()(function)


@unspecialised
def _request_of(rows, query_start_loc, num_slots, SEARCH_STEPS: tl.constexpr):
    """The batch row of each row's request, at most num_slots - 1: how many requests end at or before the row."""
    low = tl.zeros_like(rows)
    high = low + num_slots
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        searching = low < high
        behind = tl.load(query_start_loc + 1 + middle, mask=searching, other=0) <= rows
        low = tl.where(searching & behind, middle + 1, low)
        high = tl.where(searching & (behind == 0), middle, high)
    return tl.minimum(low, num_slots - 1)


@unspecialised
def _slot_of(rows, inside, idx_mapping, query_start_loc, num_slots, SEARCH_STEPS: tl.constexpr):
    """The slot of each row, int64; -1 for rows without one. Rows that are not `inside` have none."""
    real = inside & (rows < tl.load(query_start_loc + num_slots))
    request = _request_of(rows, query_start_loc, num_slots, SEARCH_STEPS)
    return tl.load(idx_mapping + request, mask=real, other=-1)


@unspecialised
def scatter_kernel(target, index, values, count, BLOCK: tl.constexpr):
    """target[index] = values. Grid: blocks of `count`."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = item < count
    tl.store(target + tl.load(index + item, mask=mask, other=0), tl.load(values + item, mask=mask), mask=mask)


@unspecialised
def positions_and_lengths_kernel(
    idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens, num_rows, num_slots,
    SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions and padding of one block of rows, and lengths of one block of batch rows. Grid: blocks of the longer of the two."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    in_batch = item < num_slots
    slot = tl.load(idx_mapping + item, mask=in_batch, other=-1)
    computed = tl.load(num_computed_tokens + slot, mask=slot >= 0, other=0)
    start = tl.load(query_start_loc + item, mask=in_batch, other=0)
    query_len = tl.load(query_start_loc + item + 1, mask=in_batch, other=0) - start
    tl.store(seq_lens + item, tl.where(query_len > 0, computed + query_len, 0), mask=in_batch)

    in_rows = item < num_rows
    real = in_rows & (item < tl.load(query_start_loc + num_slots))
    request = _request_of(item, query_start_loc, num_slots, SEARCH_STEPS)
    slot = tl.load(idx_mapping + request, mask=real, other=-1)
    computed = tl.load(num_computed_tokens + slot, mask=slot >= 0, other=0)
    position = computed + item - tl.load(query_start_loc + request, mask=real, other=0)
    tl.store(positions + item, tl.where(real, position, 0).to(tl.int64), mask=in_rows)


@unspecialised
def prefill_ids_kernel(
    idx_mapping, query_start_loc, positions, prefill_len, all_token_ids, input_ids, num_rows, num_slots, ids_stride,
    SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Known tokens of the rows within a prefill. Grid: blocks of rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = _slot_of(row, row < num_rows, idx_mapping, query_start_loc, num_slots, SEARCH_STEPS)
    position = tl.load(positions + row, mask=slot >= 0, other=0)
    known = (slot >= 0) & (position < tl.load(prefill_len + slot, mask=slot >= 0, other=0))
    tl.store(input_ids + row, tl.load(all_token_ids + slot * ids_stride + position, mask=known, other=0), mask=known)


@unspecialised
def last_sampled_ids_kernel(
    idx_mapping, query_start_loc, positions, prefill_len, last_sampled_tokens, input_ids, num_rows, num_slots,
    SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Last sampled tokens of the rows past a prefill, 0 for rows without a slot. Grid: blocks of rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = _slot_of(row, row < num_rows, idx_mapping, query_start_loc, num_slots, SEARCH_STEPS)
    position = tl.load(positions + row, mask=slot >= 0, other=0)
    decoded = (slot >= 0) & (position >= tl.load(prefill_len + slot, mask=slot >= 0, other=0))
    token = tl.load(last_sampled_tokens + slot, mask=decoded, other=0).to(tl.int32)
    tl.store(input_ids + row, token, mask=(row < num_rows) & (decoded | (slot < 0)))


@unspecialised
def logits_indices_kernel(query_start_loc, out, num_requests, BLOCK: tl.constexpr):
    """The last row of each request. Grid: blocks of requests."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests
    last = tl.load(query_start_loc + 1 + request, mask=mask, other=0) - 1
    tl.store(out + request, tl.maximum(last, 0).to(tl.int64), mask=mask)


@unspecialised
def gather_block_table_kernel(
    idx_mapping, table, num_blocks, out, max_blocks, table_stride, num_blocks_stride, out_stride, BLOCK: tl.constexpr
):
    """One block of columns of one batch row; 0 behind the request's blocks. Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(idx_mapping + row)
    used = tl.load(num_blocks + slot * num_blocks_stride, mask=slot >= 0, other=0)
    block = tl.load(table + slot * table_stride + column, mask=column < tl.minimum(used, max_blocks), other=0)
    tl.store(out + row * out_stride + column, block, mask=column < max_blocks)


@unspecialised
def slot_mapping_kernel(
    idx_mapping, query_start_loc, positions, table, out, num_rows, num_slots, size, max_blocks, table_stride,
    BLOCK_SIZE: tl.constexpr, PAD: tl.constexpr, SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cache slots of one block of rows. Grid: blocks of the whole output, `size`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = _slot_of(row, row < num_rows, idx_mapping, query_start_loc, num_slots, SEARCH_STEPS)
    position = tl.load(positions + row, mask=slot >= 0, other=0)
    column = tl.minimum(position // BLOCK_SIZE, max_blocks - 1)
    block = tl.load(table + slot * table_stride + column, mask=slot >= 0, other=0).to(tl.int64)
    tl.store(out + row, tl.where(slot >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, PAD), mask=row < size)


@unspecialised
def num_sampled_kernel(idx_mapping, seq_lens, prefill_len, out, num_requests, BLOCK: tl.constexpr):
    """1 for requests whose known tokens are all computed. Grid: blocks of requests."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests
    slot = tl.load(idx_mapping + request, mask=mask, other=-1)
    complete = tl.load(seq_lens + request, mask=mask, other=0) >= tl.load(prefill_len + slot, mask=slot >= 0, other=0)
    tl.store(out + request, ((slot >= 0) & complete).to(tl.int32), mask=mask)


@unspecialised
def advance_kernel(
    idx_mapping, query_start_loc, sampled, num_sampled, num_computed_tokens, total_len, last_sampled_tokens, all_token_ids,
    num_requests, max_model_len, ids_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a step's results to the slots. Grid: blocks of requests."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(idx_mapping + request, mask=request < num_requests, other=-1)
    valid = slot >= 0
    start = tl.load(query_start_loc + request, mask=valid, other=0)
    query_len = tl.load(query_start_loc + request + 1, mask=valid, other=0) - start
    computed = tl.load(num_computed_tokens + slot, mask=valid, other=0)
    tl.store(num_computed_tokens + slot, computed + query_len, mask=valid)

    wanted = valid & (tl.load(num_sampled + request, mask=valid, other=0) > 0)
    token = tl.load(sampled + request, mask=wanted, other=0)
    column = tl.load(total_len + slot, mask=wanted, other=0)
    tl.store(last_sampled_tokens + slot, token, mask=wanted)
    tl.store(all_token_ids + slot * ids_stride + column, token.to(tl.int32), mask=wanted & (column < max_model_len))
    tl.store(total_len + slot, column + 1, mask=wanted)
