"""A cache of e4m3 keys and values: what is written, and what attention makes of it. Triton's interpreter reads e4m3 exactly, but loses the
carry of some numbers that it rounds (see `tests/passes/test_fp8_kernels.py`), so its writes are tested in a float32 cache that scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rung.attention import Attention, AttentionBackend, AttentionSpec, KVCache
from rung.attention.backends.flash_attn import FlashAttention2, FlashAttention3
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.rotary_write import rotate_and_write_triton
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.backends.triton_paged import TritonPaged, why_no_triton
from rung.attention.select import select_backend
from rung.errors import BackendUnavailableError
from rung.runner.config import RunnerConfig
from rung.runner.kv_cache import allocate_kv_caches, num_kv_blocks
from rung.runner.kv_groups import kv_groups
from tests.attention.cases import Batch, make_batch, make_spec
from tests.attention.rotary_cases import Heads, project

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
INTERPRETED = pytest.mark.skipif(why_no_triton(CPU) is not None, reason="needs Triton's interpreter")
SCALES = 0.015, 0.01


def fp8_cache(cache: KVCache, key_scale: float, value_scale: float) -> KVCache:
    return KVCache((cache.key / key_scale).to(E4M3), (cache.value / value_scale).to(E4M3), key_scale, value_scale)


def written(batch: Batch) -> tuple[Batch, KVCache]:
    """The batch, whose cache holds this step's rows as e4m3, and the same in float32."""
    cache = fp8_cache(batch.cache, *SCALES)
    TorchReference(batch.spec).write_kv(batch.key, batch.value, cache, batch.metadata.slot_mapping)
    wide = KVCache(cache.key.float() * SCALES[0], cache.value.float() * SCALES[1])
    return replace(batch, cache=cache), wide


BACKENDS = [TorchReference, pytest.param(TritonPaged, marks=INTERPRETED)]


@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton"])
@pytest.mark.parametrize("lengths", [[(1, 40), (1, 3), (1, 0)], [(7, 30), (1, 5), (12, 0)]], ids=["decode", "mixed"])
@pytest.mark.parametrize("cap", [None, 20.0])
def test_attention_reads_scaled_keys_and_values(backend: type[AttentionBackend], lengths: list[tuple[int, int]], cap: float | None) -> None:
    batch, wide = written(make_batch(make_spec(cap=cap), lengths, padded_rows=2))
    found, wanted = torch.empty_like(batch.query), torch.empty_like(batch.query)
    backend(batch.spec).forward(batch.query, batch.cache, found, batch.metadata)
    TorchReference(batch.spec).forward(batch.query, wide, wanted, batch.metadata)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    close = (found[: batch.num_actual_tokens].double() - batch.expected[: batch.num_actual_tokens]).norm()
    assert close < 0.06 * batch.expected.norm()  # e4m3 has three bits


@pytest.mark.parametrize("on_device", [False, True], ids=["host lengths", "device lengths"])
def test_the_reference_reads_the_same_without_host_lengths(on_device: bool) -> None:
    batch, wide = written(make_batch(make_spec(), [(7, 30), (1, 5)]))
    metadata = replace(batch.metadata, host=None) if on_device else batch.metadata
    found, wanted = torch.empty_like(batch.query), torch.empty_like(batch.query)
    TorchReference(batch.spec).forward(batch.query, batch.cache, found, metadata)
    TorchReference(batch.spec).forward(batch.query, wide, wanted, metadata)
    torch.testing.assert_close(found, wanted)


def test_writes_are_scaled_and_clamped_and_leave_other_slots() -> None:
    cache = KVCache(torch.ones(2, 4, 1, 2).to(E4M3), torch.ones(2, 4, 1, 2).to(E4M3), 0.5, 2.0)
    rows = torch.tensor([[[3.0, 1e6]], [[float("nan"), 1.0]]])
    TorchReference(make_spec(1, 1)).write_kv(rows, rows, cache, torch.tensor([5, -1]))
    assert cache.key[1, 1, 0].tolist() == [6.0, 448.0]
    assert cache.value[1, 1, 0].tolist() == [1.5, 448.0]
    assert int((cache.key.float() == 1).sum()) == 14


@INTERPRETED
def test_kernels_scale_and_clamp_what_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "is_fp8", True)
    heads = Heads(num_heads=4, num_kv_heads=2, head_size=16, rotary=8)
    plain, scaled = project(heads, [3, -1, 20]), project(heads, [3, -1, 20])
    for projection in (plain, scaled):
        projection.value[0, 0, 0] = 1e6
    scaled = replace(scaled, cache=KVCache(scaled.cache.key, scaled.cache.value, *SCALES))
    for projection in (plain, scaled):
        names = (projection.query, projection.key, projection.value, projection.rotation, projection.rotated, projection.cache)
        rotate_and_write_triton(*names, projection.slots)
    torch.testing.assert_close(scaled.cache.key * SCALES[0], plain.cache.key, equal_nan=True)
    assert float(scaled.cache.value.nan_to_num().max()) == 448.0
    TritonPaged(make_spec()).write_kv(scaled.key, scaled.value, scaled.cache, scaled.slots)
    kept = (scaled.value[[0, 2]] / SCALES[1]).clamp(-448, 448)
    torch.testing.assert_close(scaled.cache.value.flatten(0, 1)[[3, 20]], kept)


def test_backends_that_cannot_read_e4m3_say_so() -> None:
    spec = make_spec()
    assert select_backend(spec, torch.float32, CPU, 16, fp8_cache=True)[0] is TorchReference
    for backend in (FlashAttention3, FlashAttention2, FlashTriton):
        assert "e4m3 queries" in (backend.why_not_fp8_cache(CPU) or "")

    class Plain(TorchReference):
        @classmethod
        def why_not_fp8_cache(cls, device: torch.device) -> str | None:
            return AttentionBackend.why_not_fp8_cache.__func__(cls, device)  # type: ignore[attr-defined]

    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr("rung.attention.select._ELSEWHERE", (Plain,))
        with pytest.raises(BackendUnavailableError, match="in the model's dtype only"):
            select_backend(spec, torch.float32, CPU, 16, fp8_cache=True)


def test_the_same_bytes_hold_twice_the_blocks_of_bf16() -> None:
    layer = Attention("a", AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25))
    layer.key_scale, layer.value_scale = SCALES
    counts = []
    for dtype in (torch.bfloat16, E4M3):
        config = RunnerConfig(kv_cache_bytes=2**20, max_model_len=64, kv_cache_dtype="fp8" if dtype == E4M3 else "auto")
        groups = kv_groups({"a": layer}, config, dtype)
        counts.append(num_kv_blocks(config, groups, CPU))
        cache = allocate_kv_caches({"a": layer}, groups, counts[-1], config, dtype, CPU)["a"]
        assert cache.key.nbytes + cache.value.nbytes <= 2**20
        assert (cache.key_scale, cache.value_scale) == (SCALES if dtype == E4M3 else (1.0, 1.0))
    assert counts[1] >= 2 * counts[0]
