"""The decode kernel of our own in CUDA C++ on the device, and Triton's where it does not take a batch: against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from rung.attention import AttentionSpec, KVCache
from rung.attention.backends.decode_attention import (
    DECODE,
    DecodeLaunch,
    FreshKeys,
    decode_attention,
    plan_decode,
    why_not_decode,
    why_not_rotated,
)
from rung.attention.backends.launch_plan import plan_launch
from rung.attention.backends.rotary_write import rotate_and_write_triton
from rung.attention.backends.triton_paged import TritonPaged
from tests.attention.cases import Batch, make_batch, make_spec
from tests.attention.rotary_cases import Heads, project
from tests.gpu.sync_debug import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
E4M3 = torch.float8_e4m3fn
LENGTHS = [(1, n) for n in (0, 1, 14, 15, 16, 17, 31, 127, 500, 1300, 5000)]  # 5000 keys: warps come back for more pages than lanes hold
LAUNCHES = [
    DecodeLaunch(warps=w, blocks=b, slots=s) for w, b, s in [(1, 1, 3), (2, 1, 4), (4, 1, 4), (8, 1, 6), (8, 2, 4), (8, 4, 4), (4, 8, 3)]
]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")


def decodes(spec: AttentionSpec, dtype: torch.dtype = torch.bfloat16, block_size: int = 16, **padding: int) -> Batch:
    return make_batch(spec, LENGTHS, dtype=dtype, device="cuda", block_size=block_size, **padding).without_host()


def attend(batch: Batch, launch: DecodeLaunch, out: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    assert why_not_decode(batch.query, batch.cache, out, batch.spec) is None
    decode_attention(batch.spec, launch, batch.query, batch.cache, out, batch.metadata, scale)


def written(batch: Batch) -> Batch:
    """With this step's keys in the cache."""
    TritonPaged(batch.spec).write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
    return batch


def error(batch: Batch, out: torch.Tensor) -> float:
    real = batch.num_actual_tokens
    assert bool((out[real:].double() == 0).all()), "padded rows are not zero"
    return float((out[:real].double().cpu() - batch.expected[:real]).norm() / batch.expected[:real].norm())


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (8, 1, 128), (4, 4, 64), (7, 1, 64)], ids=str)
def test_every_launch_equals_float64(heads: tuple[int, int, int], launch: DecodeLaunch) -> None:
    batch = written(decodes(make_spec(*heads), padded_requests=3, padded_rows=5))
    out = torch.full_like(batch.query, float("nan"))
    attend(batch, launch, out)
    assert error(batch, out) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (100, None), (16, 30.0), (1, None), (4096, 50.0)])
def test_pages_windows_and_caps(block_size: int, dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    batch = written(decodes(make_spec(8, 2, 128, window=window, cap=cap), dtype, block_size, padded_rows=1, slack=40))
    for launch in LAUNCHES[::2]:
        out = torch.full_like(batch.query, float("nan"))
        attend(batch, launch, out)
        assert error(batch, out) < TOLERANCE[dtype], launch


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128)], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_an_e4m3_cache(heads: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    spec = make_spec(*heads, window=window)
    batch = written(decodes(spec, dtype, padded_rows=2))
    kept = [half.nan_to_num(0.0).div(scale).to(E4M3) for half, scale in ((batch.cache.key, 0.5), (batch.cache.value, 0.25))]
    narrow = replace(batch, cache=KVCache(*kept, 0.5, 0.25))
    wide = replace(batch, cache=KVCache(*((half.float() * scale).to(dtype) for half, scale in zip(kept, (0.5, 0.25), strict=True))))
    expected, out = torch.empty_like(batch.query), torch.empty_like(batch.query)
    for launch in LAUNCHES:
        attend(wide, launch, expected)
        attend(narrow, launch, out)
        torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("launch", LAUNCHES[::3], ids=str)
def test_an_e4m3_output(launch: DecodeLaunch, dtype: torch.dtype) -> None:
    batch = written(decodes(make_spec(8, 2, 128), dtype, padded_rows=2))
    plain, scale = torch.empty_like(batch.query), torch.tensor([0.03], device="cuda")
    narrow = torch.empty_like(batch.query, dtype=E4M3)
    attend(batch, launch, plain)
    attend(batch, launch, narrow, scale)
    wanted = (plain.float() / scale).clamp(-448, 448).to(E4M3)
    assert torch.equal(narrow.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    "lengths", [[(0, 20), (1, 8), (0, 0), (1, 9), (0, 5), (1, 40)], [(1, 0)] * 3 + [(0, 0)] * 5, [(0, 0)] * 4], ids=str
)
def test_requests_without_a_token(lengths: list[tuple[int, int]]) -> None:
    batch = written(make_batch(make_spec(8, 2, 128), lengths, dtype=torch.bfloat16, device="cuda", padded_rows=3).without_host())
    for launch in LAUNCHES:
        out = torch.full_like(batch.query, float("nan"))
        attend(batch, launch, out)
        if batch.num_actual_tokens:
            assert error(batch, out) < TOLERANCE[torch.bfloat16]
        assert bool((out[batch.num_actual_tokens :] == 0).all())


@pytest.mark.parametrize("requests", [1, 8, 64, 130])
def test_in_a_graph_behind_kernels_that_still_write(requests: int) -> None:
    """Queries and the newest keys come from kernels right in front; buffers are poisoned before each replay."""
    spec = make_spec(32, 8, 128)
    lengths = [(1, (i * 37) % 700) for i in range(requests)]
    batch = make_batch(spec, lengths, dtype=torch.bfloat16, device="cuda").without_host()
    backend, query, out = TritonPaged(spec), torch.empty_like(batch.query), torch.empty_like(batch.query)

    def step() -> None:
        query.copy_(batch.query)
        backend.write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
        backend.forward(query, batch.cache, out, batch.metadata)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with no_waiting():
        for _ in range(20):
            query.fill_(float("nan"))
            out.fill_(float("nan"))
            batch.cache.key.view(-1, 8, 128).index_fill_(0, batch.metadata.slot_mapping, 7.0)
            graph.replay()
    assert error(batch, out) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("requests", [1, 3, 40, 200])
def test_decodes_take_it_and_triton_gives_the_same(requests: int) -> None:
    spec = make_spec(32, 8, 128)
    batch = written(make_batch(spec, [(1, (i * 53) % 900) for i in range(requests)], dtype=torch.bfloat16, device="cuda").without_host())
    size = {"num_tokens": requests, "num_requests": requests, "max_query_len": 1, "max_seq_len": 900, "block_size": 16, "processors": 132}
    outs = [torch.empty_like(batch.query) for _ in range(2)]
    before = len(DECODE.loaded)
    for backend, out in zip((TritonPaged(spec), TritonPaged(spec, plan_launch(spec, **size))), outs, strict=True):
        backend.forward(batch.query, batch.cache, out, batch.metadata)
        assert error(batch, out) < TOLERANCE[torch.bfloat16]
    assert len(DECODE.loaded) > 0
    assert len(DECODE.loaded) - before <= 1


def test_counts_and_lengths_change_no_image() -> None:
    spec = make_spec(8, 2, 64)
    backend = TritonPaged(spec)
    counts = [1, 2, 3, 16, 17, 33]
    images = {plan_decode(spec, count, 20, kept_size=2) for count in counts}
    before = len(DECODE.loaded)
    for count, padded in itertools.product(counts, (0, 4)):
        batch = make_batch(spec, [(1, 5)] * count, dtype=torch.bfloat16, device="cuda", padded_requests=padded, padded_rows=padded)
        batch.without_host().check(backend, TOLERANCE[torch.bfloat16])
    assert len(DECODE.loaded) - before <= len(images) + 1  # padded rows may reach the next launch


ROTATIONS = [
    Heads(num_heads=32, num_kv_heads=8, head_size=128, rotary=128),
    Heads(num_heads=9, num_kv_heads=3, head_size=64, rotary=64),
    Heads(num_heads=16, num_kv_heads=8, head_size=128, rotary=128, offset=0.0),
    Heads(num_heads=4, num_kv_heads=1, head_size=64, rotary=32, offset=1.0),
    Heads(num_heads=4, num_kv_heads=4, head_size=128, rotary=64),
]


@pytest.mark.parametrize("narrow", [False, True], ids=["kept", "e4m3"])
@pytest.mark.parametrize("wide_angles", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", ROTATIONS, ids=str)
def test_rotation_and_write_inside(heads: Heads, dtype: torch.dtype, wide_angles: bool, narrow: bool) -> None:
    """Against a kernel that rotates and writes and one that attends: the same cache, outputs within rounding; with padded rows. What is not
    settled may have been written by the kernel in front."""
    spec = make_spec(heads.num_heads, heads.num_kv_heads, heads.head_size, window=300 if heads.rotary == 64 else None)
    batch = decodes(spec, dtype, padded_rows=2)
    metadata = batch.metadata
    projection = project(heads, list(range(len(batch.query))), dtype=dtype, device="cuda")
    rotation = projection.rotation
    if wide_angles:
        rotation = replace(rotation, cos=rotation.cos.float(), sin=rotation.sin.float())
    halves, scales = [half.nan_to_num(0.0) for half in (batch.cache.key, batch.cache.value)], (0.5, 0.25) if narrow else (1.0, 1.0)
    halves = [(half.float() / scale).to(E4M3 if narrow else dtype) for half, scale in zip(halves, scales, strict=True)]
    made = (projection.query, projection.key, projection.value)
    apart, rotated, expected = (
        KVCache(*(half.clone() for half in halves), *scales),
        torch.empty_like(batch.query),
        torch.empty_like(batch.query),
    )
    for launch, settled in itertools.product(LAUNCHES, (False, True)):
        rotate_and_write_triton(*made, rotation, rotated, apart, metadata.slot_mapping)
        decode_attention(spec, launch, rotated, apart, expected, metadata, None)
        joined, out = KVCache(*(half.clone() for half in halves), *scales), torch.full_like(batch.query, float("nan"))
        fresh = FreshKeys(key=projection.key, value=projection.value, rotation=rotation, slot_mapping=metadata.slot_mapping)
        assert why_not_rotated(projection.query, fresh) is None
        if settled:
            torch.cuda.synchronize()  # the kernel reads the cache before its predecessor has ended
        decode_attention(spec, launch, projection.query, joined, out, replace(metadata, settled=settled), None, fresh)
        for mine, theirs in ((joined.key, apart.key), (joined.value, apart.value)):
            same = mine.view(torch.uint8) == theirs.view(torch.uint8)
            assert same.double().mean() > 0.9999, launch  # a fused multiply-add may round to the neighbour
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.13 if narrow else 8e-3, atol=2e-3)
        real = batch.num_actual_tokens
        torch.testing.assert_close(out[:real].float(), expected[:real].float(), rtol=2e-2, atol=3e-2)
        relative = (out[:real].double() - expected[:real].double()).norm() / expected[:real].double().norm()
        assert float(relative) < TOLERANCE[dtype], launch
        assert bool((out[real:] == 0).all())


def test_a_row_without_a_slot_writes_nothing() -> None:
    """A padded request of a decode graph has one key in block 0 and no slot."""
    spec = make_spec(8, 2, 128)
    heads = Heads(num_heads=8, num_kv_heads=2, head_size=128, rotary=128)
    batch = written(decodes(spec))
    slots = batch.metadata.slot_mapping.clone()
    slots[3] = -1
    projection = project(heads, slots.tolist(), dtype=torch.bfloat16, device="cuda")
    fresh = FreshKeys(key=projection.key, value=projection.value, rotation=projection.rotation, slot_mapping=slots)
    before, out = batch.cache.key.clone(), torch.full_like(batch.query, float("nan"))
    for launch in LAUNCHES:
        torch.cuda.synchronize()
        decode_attention(spec, launch, projection.query, batch.cache, out, batch.metadata, None, fresh)
        assert not out.isnan().any(), launch
    changed = (batch.cache.key.view(torch.int16) != before.view(torch.int16)).any(-1).any(-1).flatten().nonzero().flatten().tolist()
    assert set(changed) <= {slot for slot in slots.tolist() if slot >= 0}


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_a_row_with_nan_shows_it(launch: DecodeLaunch) -> None:
    batch = written(decodes(make_spec(8, 2, 128), padded_rows=2))
    wanted, out = torch.empty_like(batch.query), torch.empty_like(batch.query)
    attend(batch, launch, wanted)
    batch.query[4, 1, 3] = float("nan")
    batch.query[9, 7, 0] = float("inf")
    attend(batch, launch, out)
    for row, head in ((4, 1), (9, 7)):
        assert bool(out[row, head].isnan().all())
        out[row, head] = wanted[row, head]
    assert torch.equal(out, wanted)


def test_a_backend_takes_both_for_decodes_alone() -> None:
    spec = make_spec(8, 2, 128)
    heads = Heads(num_heads=8, num_kv_heads=2, head_size=128, rotary=128)
    for lengths, settled, taken in ((LENGTHS, True, True), (LENGTHS, False, True), ([(3, 4), (1, 9)], True, False)):
        batch = make_batch(spec, lengths, dtype=torch.bfloat16, device="cuda").without_host()
        projection = project(heads, list(range(len(batch.query))), dtype=torch.bfloat16, device="cuda")
        out = torch.zeros_like(batch.query)
        made = (projection.query, projection.key, projection.value, projection.rotation)
        torch.cuda.synchronize()
        metadata = replace(batch.metadata, settled=settled)
        assert TritonPaged(spec).rotate_and_attend(*made, batch.cache, out, metadata) == taken == bool(out.any())
