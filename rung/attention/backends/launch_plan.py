"""How a batch of attention is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from rung.attention.base import AttentionSpec

MAX_SPLITS = 64
_KEYS_A_SPLIT = 128  # a smaller share is not worth its part of the reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one batch is cut into programs. Depends on shapes and bounds alone, so a captured launch serves every batch within them."""

    block_q: int  # tokens a program
    block_m: int  # rows (tokens x grouped heads) a program, a power of two of at least 16
    block_n: int  # keys a step
    splits: int  # shares of the keys
    num_warps: int
    num_stages: int
    far: bool = False
    late: bool = False  # a step multiplies the weights of the step before, so that softmax and matrix units work side by side


def query_blocks(num_tokens: int, num_requests: int, block_q: int) -> int:
    """Query blocks that cover any batch of these sizes, padded rows included: each request starts a block of its own."""
    return num_tokens if block_q == 1 else num_tokens // block_q + num_requests + 1


def plan_launch(
    spec: AttentionSpec,
    *,
    num_tokens: int,
    num_requests: int,
    max_query_len: int,
    max_seq_len: int,
    processors: int,
    element_size: int = 2,
) -> Launch:
    """The launch for a batch on a device of `processors` multiprocessors, found on an H200 (`bench.attention_sweep`).

    Decode reads each key once for one group of heads and is bound by the bytes in flight: three or four programs of 64 keys a step share
    a multiprocessor. Where there are fewer than two, the keys are split; where there are more, a program holds less. Prefill wants tiles
    that fill the matrix units, of which one program fits."""
    group = spec.num_heads // spec.num_kv_heads
    columns = padded(spec.head_size)
    rows = max_query_len * group
    decode = rows <= 16
    if decode:
        block_m, num_warps = 16, 4
    else:
        block_m = 32 if rows <= 32 or element_size > 2 else 64 if rows <= 64 else 128
        num_warps = 8 if block_m == 128 else 4
    block_m = max(block_m, padded(group))
    block_n = max(16, min(64, 8192 // columns) * 2 // element_size)
    block_q = 1 if max_query_len == 1 else block_m // group
    programs = max(1, query_blocks(num_tokens, num_requests, block_q) * spec.num_kv_heads)
    room = 2 * processors * max(1, 128 // columns)  # programs that keep the memory busy
    reach = max_seq_len if spec.sliding_window is None else min(max_seq_len, spec.sliding_window + block_q)
    splits = max(1, min(room // programs, -(-reach // _KEYS_A_SPLIT), MAX_SPLITS))
    num_stages = 2 if decode and programs > room else 3
    return Launch(block_q=block_q, block_m=block_m, block_n=block_n, splits=splits, num_warps=num_warps, num_stages=num_stages, far=block_m >= 64)


def padded(size: int) -> int:
    """The next power of two, at least 16: Triton's tiles have no other sizes."""
    return max(16, 1 << (size - 1).bit_length())
