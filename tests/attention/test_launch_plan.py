from __future__ import annotations

import pytest

from rung.attention import AttentionSpec, BatchBounds
from rung.attention.backends.launch_plan import kernel_of, plan_launch, rehearsal_batches

LIMITS = BatchBounds(num_tokens=80, num_requests=6, max_query_len=72, max_seq_len=700)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (8, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize("processors", [1, 12])
def test_rehearsed_batches_take_every_kernel(num_heads: int, num_kv_heads: int, head_size: int, processors: int) -> None:
    spec = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=1.0)
    batches = rehearsal_batches(spec, LIMITS, block_size=16, processors=processors, element_size=2)

    def kernel(bounds: BatchBounds, block_size: int) -> tuple[object, ...]:
        return kernel_of(spec, bounds, block_size=block_size, processors=processors, element_size=2)

    paged = {kernel(bounds, 16) for bounds in batches}
    flat = {kernel(bounds, 0) for bounds in batches if bounds.max_seq_len == bounds.max_query_len > 1}
    assert 4 < len(paged) <= len(batches) < 40
    for length in range(1, LIMITS.max_query_len + 1):
        for requests in range(1, LIMITS.num_requests + 1):
            for tokens in range(length + requests - 1, min(LIMITS.num_tokens, length * requests) + 1, 5):
                for longest in (length, LIMITS.max_seq_len):
                    bounds = BatchBounds(num_tokens=tokens, num_requests=requests, max_query_len=length, max_seq_len=max(length, longest))
                    assert kernel(bounds, 16) in paged, bounds
                    assert longest != length or length == 1 or kernel(bounds, 0) in flat, bounds


@pytest.mark.parametrize("num_requests", [1, 8, 32, 64, 100, 256])
@pytest.mark.parametrize("max_seq_len", [4096, 4097])
def test_an_e4m3_cache_changes_tiles_where_a_bf16_one_changes_them(num_requests: int, max_seq_len: int) -> None:
    """So the batches of a rehearsal, which knows no cache, take all kernels of either."""
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=1.0)
    size = {"num_tokens": num_requests, "num_requests": num_requests, "max_query_len": 1, "max_seq_len": max_seq_len}
    wide, narrow = (plan_launch(spec, **size, block_size=16, processors=132, kept_size=kept) for kept in (2, 1))
    small = num_requests == 256 and max_seq_len == 4096
    assert (wide.num_warps == 1) == (narrow.num_warps == 1) == small
    assert (wide == narrow) == (not small)
    assert wide.splits == narrow.splits
