"""The Triton kernels of a decode graph: inputs in one, sampling in two. Importing this file needs Triton."""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from rung.runner.ops.triton_step_kernels import specialised_on, unspecialised

# Of `sampler.failures`
NAN_TOKEN = tl.constexpr(-2)
NOTHING_ALLOWED_TOKEN = tl.constexpr(-3)
# Of `sampler.noise`: the finaliser of SplitMix64.
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@unspecialised
def decode_inputs_kernel(
    idx_mapping, query_start_loc, num_computed_tokens, prefill_len, all_token_ids, last_sampled_tokens, table, num_blocks,
    input_ids, positions, seq_lens, batch_table, slot_mapping,
    ids_stride, max_blocks, table_stride, num_blocks_stride, batch_stride,
    BLOCK_SIZE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of columns of a row's block table; the first also writes the row's inputs. Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(idx_mapping + row)
    valid = slot >= 0
    used = tl.load(num_blocks + slot * num_blocks_stride, mask=valid, other=0)
    blocks = tl.load(table + slot * table_stride + column, mask=column < tl.minimum(used, max_blocks), other=0)
    tl.store(batch_table + row * batch_stride + column, blocks, mask=column < max_blocks)
    if tl.program_id(1) == 0:
        computed = tl.load(num_computed_tokens + slot, mask=valid, other=0)
        scheduled = tl.load(query_start_loc + row + 1) > tl.load(query_start_loc + row)
        tl.store(seq_lens + row, tl.where(scheduled, computed + 1, 0))
        tl.store(positions + row, computed.to(tl.int64))
        known = valid & (computed < tl.load(prefill_len + slot, mask=valid, other=0))
        prompt = tl.load(all_token_ids + slot * ids_stride + computed, mask=known, other=0)
        sampled = tl.load(last_sampled_tokens + slot, mask=valid & (known == 0), other=0).to(tl.int32)
        tl.store(input_ids + row, tl.where(known, prompt, sampled))
        at = tl.minimum(computed // BLOCK_SIZE, max_blocks - 1)
        block = tl.load(table + slot * table_stride + at, mask=valid, other=0).to(tl.int64)
        tl.store(slot_mapping + row, tl.where(valid, block * BLOCK_SIZE + computed % BLOCK_SIZE, PAD))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel(stream, tokens):
    """Standard Gumbel noise of a row's stream at `tokens`."""
    bits = _mix(stream + (tokens + 1).to(tl.uint64) * GAMMA)
    uniform = (bits >> 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19  # 2 ** -63
    uniform = tl.minimum(tl.maximum(uniform, 5.421010862427522e-20), 0.99999994)  # 2 ** -64, 1 - 2 ** -24
    # -log1p(-uniform), which keeps full precision for small uniforms (Goldberg, What every computer scientist should know, theorem 4).
    rest = 1.0 - uniform
    tail = tl.where(rest == 1.0, uniform, -tl.log(rest) * uniform / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    return -tl.log(tail)


@triton.jit
def _add_block(best, step_of, score, step):
    """The best scores so far, NaN once one was met, and the steps that they are from; of equal ones the first."""
    step_of = tl.where(score > best, step, step_of)
    return tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL), step_of


@triton.jit
def _sample_chunk(
    logits, idx_mapping, seq_lens, temperatures, seeds, best_value, best_token, vocab, logits_stride, num_chunks,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of one chunk of a row's vocabulary, STEPS blocks, or a mark when the chunk holds a NaN."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    first = chunk * (STEPS * BLOCK) + lane
    scores = logits + row * logits_stride
    blocks = ()  # on their way while the temperature is looked up; with noise they are read again, from the nearest cache
    for ahead in tl.static_range(STEPS):
        blocks += (tl.load(scores + first + ahead * BLOCK, mask=first + ahead * BLOCK < vocab, other=float("-inf")),)
    slot = tl.load(idx_mapping + row)
    temperature = tl.load(temperatures + slot, mask=slot >= 0, other=0.0)
    # Nothing crosses lanes before all blocks were looked at: a lane keeps the best of its own column.
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    step_of = tl.zeros((BLOCK,), tl.int32)
    if temperature > 0.0:
        seed = tl.load(seeds + slot, mask=slot >= 0, other=0).to(tl.uint64)
        stream = _mix(_mix(seed) + tl.load(seq_lens + row).to(tl.uint64) * GAMMA)
        for step in range(STEPS):
            token = first + step * BLOCK
            score = tl.load(scores + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            best, step_of = _add_block(best, step_of, score / temperature + _gumbel(stream, token), step)
    else:
        for known in tl.static_range(STEPS):
            best, step_of = _add_block(best, step_of, blocks[known].to(tl.float32), known)
    numbers = tl.where(best == best, best, float("-inf"))
    value = tl.max(numbers, axis=0)
    # A mark is less than every token, so it stands where the chunk holds one.
    token = tl.where(best != best, NAN_TOKEN, tl.where(numbers == value, first + step_of * BLOCK, 2147483647))
    tl.store(best_value + row * num_chunks + chunk, value)
    tl.store(best_token + row * num_chunks + chunk, tl.min(token, axis=0))


@triton.jit
def _await(PROGRAMMATIC: tl.constexpr):
    """The beginning of a kernel that may start while its predecessor runs."""
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _sample_row(best_value, best_token, num_chunks, CHUNKS: tl.constexpr):
    """The best token of a row over its chunks, or a mark."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    values = tl.load(best_value + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    tokens = tl.load(best_token + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    best = tl.argmax(values, axis=0, tie_break_left=True)
    token = tl.load(best_token + row * num_chunks + best).to(tl.int64)
    token = tl.where(tl.max(values, axis=0) == float("-inf"), NOTHING_ALLOWED_TOKEN, token)
    return tl.where(tl.min(tokens, axis=0) < 0, NAN_TOKEN, token)


@specialised_on("logits", "vocab", "logits_stride")
def sample_chunk_kernel(
    logits, idx_mapping, seq_lens, temperatures, seeds, step, best_value, best_token, vocab, logits_stride, num_chunks,
    PROGRAMMATIC: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of a row's vocabulary; the first one counts the step. Grid: (rows, chunks)."""
    _await(PROGRAMMATIC)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(step, tl.load(step) + 1)
    _sample_chunk(
        logits, idx_mapping, seq_lens, temperatures, seeds, best_value, best_token, vocab, logits_stride, num_chunks, STEPS, BLOCK
    )  # fmt: skip


@specialised_on("logits", "vocab", "logits_stride")
def pick_chunk_kernel(
    logits, idx_mapping, seq_lens, temperatures, seeds, best_value, best_token, vocab, logits_stride, num_chunks,
    PROGRAMMATIC: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same outside of a decode graph. Grid: (rows, chunks)."""
    _await(PROGRAMMATIC)
    _sample_chunk(
        logits, idx_mapping, seq_lens, temperatures, seeds, best_value, best_token, vocab, logits_stride, num_chunks, STEPS, BLOCK
    )  # fmt: skip


@unspecialised
def pick_row_kernel(best_value, best_token, out, num_chunks, PROGRAMMATIC: tl.constexpr, CHUNKS: tl.constexpr):
    """The best token of a row over its chunks, or a mark. Grid: rows."""
    _await(PROGRAMMATIC)
    tl.store(out + tl.program_id(0), _sample_row(best_value, best_token, num_chunks, CHUNKS))


@unspecialised
def sample_row_kernel(
    best_value, best_token, idx_mapping, query_start_loc, seq_lens, prefill_len, stop_ids, enabled, step, history,
    num_computed_tokens, total_len, last_sampled_tokens, all_token_ids,
    num_chunks, history_rows, history_stride, max_model_len, ids_stride,
    PROGRAMMATIC: tl.constexpr, CHUNKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """The best token of a row over its chunks, written to the history and to the row's slot. Grid: rows."""
    _await(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(enabled) == 0:
        return
    marked = _sample_row(best_value, best_token, num_chunks, CHUNKS)
    token = tl.maximum(marked, 0)
    slot = tl.load(idx_mapping + row)
    valid = slot >= 0
    wanted = valid & (tl.load(seq_lens + row) >= tl.load(prefill_len + slot, mask=valid, other=0))
    place = (tl.load(step) % history_rows) * history_stride + row
    tl.store(history + place, tl.where(wanted, marked, -1))
    computed = tl.load(num_computed_tokens + slot, mask=valid, other=0)
    query = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc + row)
    tl.store(num_computed_tokens + slot, computed + query, mask=valid)
    tl.store(last_sampled_tokens + slot, token, mask=wanted)
    column = tl.load(total_len + slot, mask=wanted, other=0)
    tl.store(all_token_ids + slot * ids_stride + column, token.to(tl.int32), mask=wanted & (column < max_model_len))
    tl.store(total_len + slot, column + 1, mask=wanted)
    stops = tl.load(stop_ids + slot * STOPS + tl.arange(0, STOPS), mask=wanted, other=-1)
    ended = (tl.sum((stops == token).to(tl.int32), axis=0) > 0) | (marked < 0)
    tl.store(idx_mapping + row, slot * 0 - 1, mask=wanted & ended)
