"""How a batch of attention is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rung.attention.backends.decode_attention import DECODE_LENGTHS, plan_decode
from rung.attention.base import AttentionSpec, BatchBounds

MAX_SPLITS = 64
_TRIED_SMALL = 4096  # the longest requests for which programs of one warp were tried; beyond, bytes bound and the larger ones were measured
# A smaller share is not worth its part of the reduction. Every other length at which a plan for decodes changes is a multiple of it.
KEYS_A_SPLIT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one batch is cut into programs. Depends on shapes and bounds alone, so a captured launch serves every batch within them."""

    block_q: int  # tokens a program
    block_m: int  # rows (tokens x grouped heads) a program, a power of two of at least 16
    block_n: int  # keys a step
    splits: int  # shares of the keys
    num_warps: int
    num_stages: int


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
    block_size: int,
    processors: int,
    element_size: int = 2,
    kept_size: int = 2,
) -> Launch:
    """The launch for a batch on a device of `processors` multiprocessors; `block_size` 0 is the flat batch, `element_size` the
    bytes of a query's number, `kept_size` of a cached one, which changes tiles and nothing of where they change. Found on an H200 with
    `bench.attention_sweep`.

    Decode reads each key once for one group of heads and is bound by the bytes in flight, so programs share a multiprocessor: where there
    are fewer than two, the keys are split; where all fit at once in a smaller size, they are smaller, and where many wait for a place, as
    small as can be. Prefill is bound by the matrix units and what waits for them: one program of 128 rows, or two of 64 where a tile is one
    page."""
    group = spec.num_heads // spec.num_kv_heads
    columns = padded(spec.head_size)
    rows = max_query_len * group
    block_m = 16 if rows <= 16 else 32 if rows <= 32 or element_size > 2 else 64 if rows <= 64 else 128
    block_n, num_warps, num_stages = 64, 4, 3
    if block_m == 128 and columns <= 128:
        if block_size % 64:  # pages of several to a tile: a smaller tile leaves registers for their addresses
            block_n, num_warps, num_stages = 32, 8, 4
        elif block_size == 0:
            num_warps = 8
        else:
            block_m = 64
    elif block_m == 128 or (element_size > 2 and columns > 128):
        num_warps = 8
    block_m = max(block_m, padded(group))
    block_q = 1 if max_query_len == 1 else block_m // group
    programs = max(1, query_blocks(num_tokens, num_requests, block_q) * spec.num_kv_heads)
    room = 2 * processors * max(1, 128 // columns)  # programs that keep the memory busy
    if block_m == 16 and room < programs <= 4 * room:
        block_n, num_warps = 32, 2
    elif block_m == 16 and programs > room and columns <= 128 and element_size == 2 and block_size % 64 and max_seq_len <= _TRIED_SMALL:
        # bf16: less shared memory, so that more programs share a multiprocessor; e4m3: a page a tile costs the fewest instructions.
        block_n, num_warps, num_stages = (32, 1, 2) if kept_size > 1 else (16, 1, 4)
    block_n = max(16, min(block_n, 8192 // columns) * 2 // element_size)
    reach = max_seq_len if spec.sliding_window is None else min(max_seq_len, spec.sliding_window + block_q)
    splits = max(1, min(room // programs, -(-reach // KEYS_A_SPLIT), MAX_SPLITS))
    return Launch(block_q=block_q, block_m=block_m, block_n=block_n, splits=splits, num_warps=num_warps, num_stages=num_stages)


def invariant_launch(spec: AttentionSpec, element_size: int) -> Launch:
    """The launch for every batch, so that a row's keys are summed in one order: tiles begin at multiples of `block_n`, and those that a row
    does not see add nothing to the bits of its sums. Keys are not split: a share of them would begin where the longest request says."""
    group = spec.num_heads // spec.num_kv_heads
    block_m = max(64 if element_size == 2 else 32, padded(group))
    block_n = max(16, min(64, 8192 // padded(spec.head_size)) * 2 // element_size)
    return Launch(block_q=block_m // group, block_m=block_m, block_n=block_n, splits=1, num_warps=4, num_stages=3)


def rehearsal_batches(
    spec: AttentionSpec, limits: BatchBounds, *, block_size: int, processors: int, element_size: int
) -> list[BatchBounds]:
    """Batches within `limits` that together take every kernel which a batch within them can take. Sizes are sampled: what is planned
    changes with them by thresholds far apart (a test looks at all of them)."""
    group = spec.num_heads // spec.num_kv_heads
    ends = [size // group for size in (16, 32, 64)]  # query lengths up to which a program has so few rows
    lengths = sorted(
        {min(max(length, 1), limits.max_query_len) for end in (1, *ends) for length in (end, end + 1)} | {limits.max_query_len}
    )
    found: dict[tuple[object, ...], BatchBounds] = {}
    for length in lengths:
        for num_requests in _sampled(1, limits.num_requests):
            least, most = length + num_requests - 1, min(length * num_requests, limits.num_tokens)
            for num_tokens in _sampled(least, most):
                longest = (length, *(DECODE_LENGTHS if length == 1 else ()), limits.max_seq_len)
                for max_seq_len in sorted({min(one, limits.max_seq_len) for one in longest}):
                    bounds = BatchBounds(
                        num_tokens=num_tokens, num_requests=num_requests, max_query_len=length, max_seq_len=max(length, max_seq_len)
                    )
                    flat = (0,) if max_seq_len == length > 1 else ()  # prompts from their beginning
                    for pages in (block_size, *flat):
                        key = kernel_of(spec, bounds, block_size=pages, processors=processors, element_size=element_size)
                        found.setdefault((*key, bool(flat)), bounds)
    return list(dict.fromkeys(found.values()))


def kernel_of(spec: AttentionSpec, bounds: BatchBounds, *, block_size: int, processors: int, element_size: int) -> tuple[object, ...]:
    """What of a launch decides which kernel it is, rather than how often it runs."""
    launch = plan_launch(
        spec,
        num_tokens=bounds.num_tokens,
        num_requests=bounds.num_requests,
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        block_size=block_size,
        processors=processors,
        element_size=element_size,
    )
    decode = None
    if bounds.max_query_len == 1:
        decode = tuple(plan_decode(spec, bounds.num_tokens, bounds.max_seq_len, kept_size=kept) for kept in (1, 2))
    return block_size, replace(launch, splits=min(launch.splits, 2)), decode


def _sampled(first: int, last: int) -> list[int]:
    """Sizes from `first` to `last`, both included, that grow by about a fifth; none when there are none."""
    found, size = [], first
    while size < last:
        found.append(size)
        size += max(1, size // 5)
    return [*found, last] if first <= last else []


def padded(size: int) -> int:
    """The next power of two, at least 16: Triton's tiles have no other sizes."""
    return max(16, 1 << (size - 1).bit_length())
