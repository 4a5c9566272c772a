"""The Triton kernels. Without a GPU these run in Triton's interpreter, where `test_triton_interpreted` starts them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from rung.attention.backends.launch_plan import Launch, padded, plan_launch, query_blocks
from rung.attention.backends.triton_paged import TritonPaged, why_no_triton, zero_padded_rows_triton
from tests.attention.cases import LENGTHS, NAN, T13_SLOTS, Batch, check_writes_only_its_slots, make_batch, make_spec

CPU = torch.device("cpu")
runs = pytest.mark.skipif(why_no_triton(CPU) is not None, reason="needs Triton's interpreter (TRITON_INTERPRET=1)")


@runs
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_ragged_batch_equals_oracle(lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(make_spec(), lengths, padded_requests=2, padded_rows=3).without_host()
    batch.check(TritonPaged(batch.spec), 1e-5)


@runs
def test_long_keys_are_split_and_joined() -> None:
    batch = make_batch(make_spec(4, 1), [(1, 300), (1, 5), (0, 9), (1, 129)], padded_requests=1, padded_rows=2).without_host()
    launch = plan_launch(
        batch.spec,
        num_tokens=5,
        num_requests=5,
        max_query_len=1,
        max_seq_len=batch.metadata.max_seq_len,
        block_size=16,
        processors=5,
        element_size=4,
    )
    assert launch.splits == 3
    batch.check(TritonPaged(batch.spec, launch), 1e-5)


@runs
@pytest.mark.parametrize("kind", ["chunked", "mixed"])
def test_splits_with_several_rows_a_program(kind: str) -> None:
    batch = make_batch(make_spec(2, 1), LENGTHS[kind], padded_rows=2).without_host()
    size = {"num_tokens": batch.query.shape[0], "num_requests": batch.metadata.num_requests}
    launch = plan_launch(batch.spec, **size, max_query_len=33, max_seq_len=48, block_size=16, processors=1, element_size=4)
    batch.check(TritonPaged(batch.spec, replace(launch, splits=3)), 1e-5)


FIRST_CHUNKS = [(1, 0), (17, 0), (0, 0), (40, 0)]


@runs
@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, 5.0)])
@pytest.mark.parametrize("block_size", [16, 64])  # several pages a tile, and one
def test_tiles_of_several_pages_and_of_one(window: int | None, cap: float | None, block_size: int) -> None:
    lengths = [(1, 40), (9, 60)]
    batch = make_batch(make_spec(2, 1, window=window, cap=cap), lengths, block_size=block_size, padded_rows=2).without_host()
    launch = Launch(block_q=8, block_m=16, block_n=32, splits=2, num_warps=4, num_stages=3)
    batch.check(TritonPaged(batch.spec, launch), 1e-5)


def given_keys(batch: Batch, backend: TritonPaged) -> torch.Tensor:
    """Attention over a cache that holds NaN where this step's keys would be."""
    out = torch.full_like(batch.query, NAN)
    backend.forward_given_keys(batch.query, batch.key, batch.value, batch.cache, out, batch.metadata)
    return out


@runs
@pytest.mark.parametrize(("window", "cap", "head_size"), [(None, None, 16), (20, 5.0, 40)])
def test_first_chunks_are_read_from_the_flat_batch(window: int | None, cap: float | None, head_size: int) -> None:
    batch = make_batch(make_spec(2, 1, head_size, window=window, cap=cap), FIRST_CHUNKS, padded_requests=1, padded_rows=3)
    out, actual = given_keys(batch, TritonPaged(batch.spec)), batch.num_actual_tokens
    assert float((out[:actual] - batch.expected[:actual]).norm() / batch.expected.norm()) < 1e-5
    assert bool((out[actual:] == 0).all())


@runs
@pytest.mark.parametrize("without_host", [False, True])
def test_other_batches_are_read_from_the_cache(without_host: bool) -> None:
    """This step's keys are not in the cache, so a wrong result shows that it was read: with a history, and where the host does not know."""
    batch = make_batch(make_spec(2, 1), FIRST_CHUNKS if without_host else [(1, 20), (4, 0)])
    batch = batch.without_host() if without_host else batch
    for store in (batch.cache.key, batch.cache.value):
        store.nan_to_num_(nan=9.0)
    out = given_keys(batch, TritonPaged(batch.spec))[: batch.num_actual_tokens]
    assert not float((out - batch.expected[: batch.num_actual_tokens]).norm() / batch.expected.norm()) < 0.1


@runs
@pytest.mark.parametrize(("window", "cap"), [(8, None), (None, 2.0), (20, 5.0)])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_window_and_soft_cap(window: int | None, cap: float | None, kind: str) -> None:
    batch = make_batch(make_spec(window=window, cap=cap), LENGTHS[kind], padded_rows=2).without_host()
    batch.check(TritonPaged(batch.spec), 1e-5)


@runs
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"), [(9, 3, 64, 16), (4, 4, 80, 64), (2, 1, 256, 256), (6, 2, 40, 48)]
)
def test_shapes(heads: int, kv_heads: int, head_size: int, block_size: int) -> None:
    batch = make_batch(
        make_spec(heads, kv_heads, head_size), [(1, 40), (19, 4), (1, 0)], block_size=block_size, padded_rows=1
    ).without_host()
    batch.check(TritonPaged(batch.spec), 1e-5)


@runs
def test_float16() -> None:
    batch = make_batch(make_spec(), LENGTHS["mixed"], dtype=torch.float16, padded_rows=1).without_host()
    batch.check(TritonPaged(batch.spec), 2e-3)


@runs
@pytest.mark.parametrize("slots", [T13_SLOTS, [-1, -1, -1], [-(2**40), 4]], ids=str)
def test_padded_slots_write_nothing(slots: list[int]) -> None:
    check_writes_only_its_slots(TritonPaged(make_spec()), slots)


@runs
def test_rows_without_a_position_become_zero() -> None:
    batch = make_batch(make_spec(), [(4, 0), (1, 0)]).without_host()
    batch.metadata.seq_lens.copy_(torch.tensor([2, 0]))
    out = batch.run(TritonPaged(batch.spec))
    assert out[[0, 1, 4]].abs().max() == 0
    assert bool(out[[2, 3]].isfinite().all())


@runs
def test_padded_rows_are_zeroed_alone() -> None:
    out = torch.full((6, 3, 16), NAN)
    out[:4] = 1.0
    zero_padded_rows_triton(out, torch.tensor([0, 1, 4, 4], dtype=torch.int32))
    assert out[:4].eq(1).all()
    assert out[4:].eq(0).all()


def plan(batch: int, query_len: int, context: int, *, block_size: int = 16, heads: tuple[int, int, int] = (32, 8, 128)) -> Launch:
    return plan_launch(
        make_spec(*heads),
        num_tokens=batch * query_len,
        num_requests=batch,
        max_query_len=query_len,
        max_seq_len=context,
        block_size=block_size,
        processors=132,
    )


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
@pytest.mark.parametrize("max_seq_len", [128, 1024, 8192, 131072])
def test_decode_launch_fills_the_device_and_no_more(batch: int, max_seq_len: int) -> None:
    launch = plan(batch, 1, max_seq_len)
    assert launch.block_q == 1
    assert launch.splits == 1 or batch * 8 * launch.splits <= 264
    assert launch.splits * 128 <= max(128, max_seq_len)


@pytest.mark.parametrize(("batch", "block_n", "num_warps", "splits"), [(1, 64, 4, 33), (8, 64, 4, 4), (64, 32, 2, 1), (256, 64, 4, 1)])
def test_decodes_that_fit_in_a_smaller_size_are_smaller(batch: int, block_n: int, num_warps: int, splits: int) -> None:
    launch = plan(batch, 1, 8192)
    assert (launch.block_n, launch.num_warps, launch.splits) == (block_n, num_warps, splits)


def test_decodes_that_wait_for_a_place_are_smaller_still() -> None:
    tiles = [(launch.block_n, launch.num_warps) for launch in (plan(256, 1, 4096), plan(256, 1, 4096, block_size=64))]
    assert tiles == [(32, 1), (64, 4)]


def test_small_heads_are_split_further() -> None:
    assert plan(64, 1, 1024, heads=(9, 3, 64)).splits == 2
    assert plan(64, 1, 1024, heads=(9, 3, 128)).splits == 1


@pytest.mark.parametrize(
    ("block_size", "tile"), [(0, (128, 64, 8)), (16, (128, 32, 8)), (64, (64, 64, 4)), (256, (64, 64, 4)), (48, (128, 32, 8))]
)
def test_prefill_tiles_follow_the_pages(block_size: int, tile: tuple[int, int, int]) -> None:
    launch = plan(1, 4096, 4096, block_size=block_size)
    assert (launch.block_m, launch.block_n, launch.num_warps) == tile
    assert launch.block_q * 4 == launch.block_m


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("query_len", [1, 4, 16, 4096])
def test_tiles_fit_in_shared_memory(head_size: int, query_len: int) -> None:
    for block_size in (0, 16, 64, 256):
        launch = plan(1, query_len, 4096, block_size=block_size, heads=(8, 2, head_size))
        columns = padded(head_size)
        assert 2 * columns * (launch.block_m + 2 * launch.num_stages * launch.block_n) <= 227 << 10


def test_query_blocks_cover_every_batch() -> None:
    for query_lens in ([1, 1, 1], [17, 0, 33], [16, 16], [0, 0, 5], [64]):
        for rows in (0, 1, 15, 40):
            needed = sum(-(-length // 16) for length in [*query_lens, rows])
            assert query_blocks(sum(query_lens) + rows, len(query_lens), 16) >= needed


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("spec", "dtype", "block_size", "reason"),
    [
        (make_spec(head_size=512), torch.float16, 16, "head size 512 is above 256"),
        (make_spec(), torch.float16, 24, "block size 24 is no multiple of 16"),
        (make_spec(), torch.float64, 16, "torch.float64 is not one of torch.float16, torch.bfloat16, torch.float32"),
    ],
)
def test_limits_are_stated(monkeypatch: pytest.MonkeyPatch, spec, dtype: torch.dtype, block_size: int, reason: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("rung.attention.backends.triton_paged.why_no_triton", lambda device: None)
    assert TritonPaged.why_not(spec, dtype, CPU, block_size) == reason


def test_missing_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("rung.attention.backends.triton_paged.why_no_triton", why_no_triton.__wrapped__)
    assert TritonPaged.why_not(make_spec(), torch.float16, CPU, 16) == "Triton is not installed"


@runs
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lengths", [[(1, 40), (1, 200), (1, 9)], [(3, 40), (2, 200), (4, 0)]], ids=["decodes", "mixed"])
def test_a_row_with_nan_shows_it(lengths: list[tuple[int, int]], splits: int) -> None:
    """So that whoever samples from it can report its request; the other rows know nothing of it."""
    spec = make_spec(4, 2, 32)
    batch = make_batch(spec, lengths, padded_rows=2).without_host()
    launch = Launch(block_q=1, block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=2)
    wanted = batch.run(TritonPaged(spec, launch))
    row = batch.num_actual_tokens - 1
    batch.query[row, 1, 3] = float("nan")
    out = batch.run(TritonPaged(spec, launch))
    assert bool(out[row, 1].isnan().all())
    out[row, 1] = wanted[row, 1]
    assert torch.equal(out, wanted)
