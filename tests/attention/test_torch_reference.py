from __future__ import annotations

import pytest
import torch

from rung.attention.backends import torch_reference
from rung.attention.backends.torch_reference import TorchReference
from tests.attention.cases import LENGTHS, T13_SLOTS, Batch, check_writes_only_its_slots, make_batch, make_spec

ROADS = ["by request", "on device"]


def on_road(batch: Batch, road: str) -> Batch:
    return batch if road == "by request" else batch.without_host()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("padding", [(0, 0), (3, 5)], ids=["exact", "padded"])
def test_ragged_batch_equals_oracle(road: str, lengths: list[tuple[int, int]], padding: tuple[int, int]) -> None:
    batch = make_batch(make_spec(), lengths, padded_requests=padding[0], padded_rows=padding[1])
    on_road(batch, road).check(TorchReference(batch.spec), 1e-6)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(("window", "cap"), [(8, None), (None, 2.0), (20, 5.0)])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_window_and_soft_cap(road: str, window: int | None, cap: float | None, kind: str) -> None:
    batch = make_batch(make_spec(window=window, cap=cap), LENGTHS[kind], padded_rows=2)
    on_road(batch, road).check(TorchReference(batch.spec), 1e-6)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (4, 4, 80), (8, 1, 256)])
def test_shapes(road: str, block_size: int, heads: int, kv_heads: int, head_size: int) -> None:
    batch = make_batch(make_spec(heads, kv_heads, head_size), LENGTHS["mixed"], block_size=block_size)
    on_road(batch, road).check(TorchReference(batch.spec), 1e-6)


@pytest.mark.parametrize("road", ROADS)
def test_bfloat16(road: str) -> None:
    batch = make_batch(make_spec(), LENGTHS["mixed"], dtype=torch.bfloat16, padded_rows=1)
    on_road(batch, road).check(TorchReference(batch.spec), 1e-2)


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_agree_on_both_roads(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = [tuple(torch.randint(0, 40, (2,), generator=generator).tolist()) for _ in range(6)]
    batch = make_batch(make_spec(), lengths, padded_requests=seed % 3, padded_rows=seed % 4, slack=seed * 7, seed=seed)
    for road in ROADS:
        on_road(batch, road).check(TorchReference(batch.spec), 1e-6)


def test_rows_are_gathered_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_reference, "_GATHERED_ELEMENTS", 1)
    batch = make_batch(make_spec(), LENGTHS["mixed"], padded_rows=2).without_host()
    batch.check(TorchReference(batch.spec), 1e-6)


@pytest.mark.parametrize("road", ROADS)
def test_rows_without_a_position_become_zero(road: str) -> None:
    batch = make_batch(make_spec(), [(4, 0), (1, 0)])
    assert batch.metadata.host is not None
    batch.metadata.seq_lens.copy_(torch.tensor([2, 0]))
    batch.metadata.host.seq_lens[:] = [2, 0]
    out = on_road(batch, road).run(TorchReference(batch.spec))
    assert out[[0, 1, 4]].abs().max() == 0
    assert bool(out[[2, 3]].isfinite().all())


def test_device_road_reads_no_length_on_the_host() -> None:
    """Changed lengths change the result of the same traced operations: nothing was frozen."""
    spec = make_spec()
    first = make_batch(spec, [(1, 20), (9, 3), (2, 30)], padded_requests=1, padded_rows=4, slack=40).without_host()
    second = make_batch(spec, [(3, 50), (1, 0), (4, 11)], padded_requests=1, padded_rows=8, slack=19, seed=5).without_host()
    assert first.query.shape == second.query.shape
    backend = TorchReference(spec)
    blocks = max(first.metadata.block_table.shape[1], second.metadata.block_table.shape[1])

    def forward(batch: Batch) -> list[torch.Tensor]:
        meta = batch.metadata
        table = torch.nn.functional.pad(meta.block_table, (0, blocks - meta.block_table.shape[1]))
        size = 32
        store = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 0, 0, size - t.shape[0])) for t in (batch.cache.key, batch.cache.value)]
        return [batch.query, batch.key, batch.value, *store, meta.query_start_loc, meta.seq_lens, table, meta.slot_mapping]

    def step(query, key, value, key_cache, value_cache, starts, seq_lens, table, slots):  # type: ignore[no-untyped-def]
        from rung.attention import AttentionMetadata, KVCache

        metadata = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=slots,
            num_requests=4,
            num_actual_tokens=query.shape[0],
            max_query_len=16,
            max_seq_len=80,
        )
        cache = KVCache(key_cache, value_cache)
        out = torch.empty_like(query)
        backend.write_kv(key, value, cache, slots)
        backend.forward(query, cache, out, metadata)
        return out

    from torch.fx.experimental.proxy_tensor import make_fx

    recorded = make_fx(step)(*(tensor.clone() for tensor in forward(first)))
    for batch in (first, second):
        out = recorded(*forward(batch)).double()
        assert torch.allclose(out, batch.expected, atol=1e-5)


@pytest.mark.parametrize("slots", [T13_SLOTS, [-1, -1, 79], [3, -1], [-1, -1, -1], [0], []], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_slots_write_nothing(slots: list[int], dtype: torch.dtype) -> None:
    check_writes_only_its_slots(TorchReference(make_spec()), slots, dtype=dtype)


def test_ungroupable_heads_are_refused() -> None:
    reason = TorchReference.why_not(make_spec(4, 3), torch.float32, torch.device("cpu"), 16)
    assert reason == "4 heads cannot be grouped over 3 KV heads"
