"""Attention on the device: Triton (and FlashAttention where there is one) against float64, in and out of CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rung.attention import AttentionBackend, AttentionMetadata, KVCache
from rung.attention.backends.flash_attn import FlashAttention3
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.rotary_write import ROTATE_AND_WRITE
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.backends.triton_paged import PAGED_ATTENTION, WRITE_KV, TritonPaged, zero_padded_rows_triton
from rung.attention.select import select_backend
from tests.attention.cases import LENGTHS, NAN, T13_SLOTS, Batch, check_writes_only_its_slots, make_batch, make_spec
from tests.attention.rotary_cases import HEADS, SLOTS, Heads, check, project
from tests.gpu.sync_debug import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 1e-5}
BACKENDS: list[type[AttentionBackend]] = [TritonPaged, TorchReference, FlashAttention3]

# Name -> (query length, history): decode alone and in numbers, long and short, prompts and mixtures.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one long decode": [(1, 8000)],
    "64 decodes": [(1, (i * 37) % 1500) for i in range(64)],
    "long and short decodes": [(1, 4000), (1, 3), (1, 700), (1, 64)],
    "prompt": [(1000, 0)],
    "chunk": [(130, 3000)],
    "mixed": [(1, 2000), (1, 15), (298, 0), (5, 100), (64, 64)],
    "verify": [(4, 900), (4, 17), (4, 0)],
}


def usable(backend: type[AttentionBackend], batch: Batch) -> None:
    reason = backend.why_not(batch.spec, batch.query.dtype, batch.query.device, batch.cache.block_size)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_batch_equals_float64(backend: type[AttentionBackend], lengths: list[tuple[int, int]]) -> None:
    spec = make_spec(8, 2, 128)
    batch = make_batch(spec, lengths, dtype=torch.bfloat16, device="cuda", padded_requests=3, padded_rows=9, slack=100).without_host()
    usable(backend, batch)
    batch.check(backend(spec), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_small_ragged_batches(lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(make_spec(), lengths, dtype=torch.float16, device="cuda", padded_requests=1, padded_rows=2).without_host()
    batch.check(TritonPaged(batch.spec), TOLERANCE[torch.float16])


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size", "dtype"),
    [
        (9, 3, 64, 16, torch.bfloat16),
        (4, 4, 80, 64, torch.bfloat16),
        (8, 1, 256, 64, torch.bfloat16),
        (8, 2, 128, 64, torch.float16),
        (4, 2, 64, 256, torch.float32),
    ],
)
def test_shapes(kind: str, heads: int, kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype) -> None:
    spec = make_spec(heads, kv_heads, head_size)
    batch = make_batch(
        spec, BATCHES["mixed"] if kind == "mixed" else [(1, 900), (1, 31)], block_size=block_size, dtype=dtype, device="cuda"
    )
    batch.without_host().check(TritonPaged(spec), TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [0, 16, 64, 256])  # 0: first chunks from the flat batch
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80), (4, 2, 96), (8, 2, 128), (4, 2, 256)], ids=str)
def test_prompts_in_every_layout(heads: tuple[int, int, int], block_size: int) -> None:
    """Heads of all sizes over one page a tile, several, and none; with a window and a soft cap, and without."""
    lengths = [(300, 0), (1, 0), (77, 0)] if block_size == 0 else [(300, 0), (1, 500), (77, 200)]
    for window, cap in ((None, None), (100, 5.0)):
        spec = make_spec(*heads, window=window, cap=cap)
        batch = make_batch(
            spec, lengths, block_size=block_size or 16, dtype=torch.bfloat16, device="cuda", padded_requests=1, padded_rows=3
        )
        backend = TritonPaged(spec)
        if block_size:
            batch.without_host().check(backend, TOLERANCE[torch.bfloat16])
            continue
        out = torch.full_like(batch.query, NAN)  # the cache holds NaN
        backend.forward_given_keys(batch.query, batch.key, batch.value, batch.cache, out, batch.metadata)
        found, actual = out.double().cpu(), batch.num_actual_tokens
        assert float((found[:actual] - batch.expected[:actual]).norm() / batch.expected.norm()) < TOLERANCE[torch.bfloat16]
        assert bool((found[actual:] == 0).all())


def test_first_chunks_of_a_fused_projection_are_read_where_they_are() -> None:
    spec = make_spec(8, 2, 128)
    batch = make_batch(spec, [(130, 0), (3, 0)], dtype=torch.bfloat16, device="cuda")
    query, key, value = torch.cat([batch.query, batch.key, batch.value], dim=1).split([8, 2, 2], dim=1)
    out = torch.full_like(batch.query, NAN)
    TritonPaged(spec).forward_given_keys(query, key, value, batch.cache, out, batch.metadata)
    assert float((out.double().cpu() - batch.expected).norm() / batch.expected.norm()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("batch_size", [2, 80, 200])  # split keys, small programs, large ones
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (16, 4, 256)], ids=str)
def test_decodes_of_every_size(heads: tuple[int, int, int], batch_size: int) -> None:
    spec = make_spec(*heads)
    lengths = [(1, (i * 131) % 700) for i in range(batch_size)]
    batch = make_batch(spec, lengths, dtype=torch.bfloat16, device="cuda", padded_requests=1, padded_rows=1).without_host()
    batch.check(TritonPaged(spec), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("backend", [TritonPaged, FlashAttention3], ids=lambda backend: backend.name)
@pytest.mark.parametrize(("window", "cap"), [(256, None), (None, 5.0)])
@pytest.mark.parametrize("kind", ["64 decodes", "mixed"])
def test_window_and_soft_cap(backend: type[AttentionBackend], window: int | None, cap: float | None, kind: str) -> None:
    spec = make_spec(8, 2, 128, window=window, cap=cap)
    batch = make_batch(spec, BATCHES[kind], dtype=torch.bfloat16, device="cuda", padded_rows=3).without_host()
    usable(backend, batch)
    batch.check(backend(spec), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("slots", [T13_SLOTS, [-1, -1, -1], [-1, 79, 0]], ids=str)
def test_padded_slots_write_nothing(backend: type[AttentionBackend], slots: list[int]) -> None:
    if backend is FlashAttention3 and FlashAttention3.why_not(make_spec(), torch.bfloat16, torch.device("cuda"), 16):
        pytest.skip("FlashAttention-3 is not here")
    check_writes_only_its_slots(backend(make_spec()), slots, device="cuda", dtype=torch.bfloat16)


def test_rows_of_a_fused_projection() -> None:
    """Query, key and value may be views of one projection."""
    spec = make_spec(8, 2, 128)
    batch = make_batch(spec, BATCHES["mixed"], dtype=torch.bfloat16, device="cuda", padded_rows=2).without_host()
    fused = torch.cat([batch.query, batch.key, batch.value], dim=1)  # [num_tokens, 12, 128]
    query, key, value = fused.split([8, 2, 2], dim=1)
    replace(batch, query=query, key=key, value=value).check(TritonPaged(spec), TOLERANCE[torch.bfloat16])


def test_padded_rows_are_zeroed_alone() -> None:
    out = torch.full((300, 9, 64), NAN, device="cuda", dtype=torch.bfloat16)
    out[:130] = 1.0
    zero_padded_rows_triton(out, torch.tensor([0, 7, 130, 130], dtype=torch.int32, device="cuda"))
    assert bool(out[:130].eq(1).all())
    assert bool(out[130:].eq(0).all())


class Static:
    """Fixed buffers large enough for several batches, as a graph needs them."""

    def __init__(self, num_tokens: int, num_requests: int, columns: int, num_blocks: int, like: Batch) -> None:
        spec, dtype = like.spec, like.query.dtype
        self.query = torch.zeros(num_tokens, spec.num_heads, spec.head_size, dtype=dtype, device="cuda")
        self.key = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_size, dtype=dtype, device="cuda")
        self.value, self.out = torch.zeros_like(self.key), torch.full_like(self.query, NAN)
        shape = (num_blocks, like.cache.block_size, spec.num_kv_heads, spec.head_size)
        self.cache = KVCache(*(torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(2)))
        self.metadata = AttentionMetadata(
            query_start_loc=torch.zeros(num_requests + 1, dtype=torch.int32, device="cuda"),
            seq_lens=torch.zeros(num_requests, dtype=torch.int32, device="cuda"),
            block_table=torch.zeros(num_requests, columns, dtype=torch.int32, device="cuda"),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device="cuda"),
            num_requests=num_requests,
            num_actual_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=columns * like.cache.block_size,
        )

    def load(self, batch: Batch) -> None:
        """Put a batch into the buffers; everything around it becomes NaN, slot -1 or length 0."""
        for mine, theirs in ((self.query, batch.query), (self.key, batch.key), (self.value, batch.value)):
            mine.fill_(NAN)[: theirs.shape[0]] = theirs
        for mine, theirs in ((self.cache.key, batch.cache.key), (self.cache.value, batch.cache.value)):
            mine.fill_(NAN)[: theirs.shape[0]] = theirs
        self.out.fill_(NAN)
        meta, theirs = self.metadata, batch.metadata
        count = theirs.num_requests
        meta.query_start_loc.fill_(batch.num_actual_tokens)[: count + 1] = theirs.query_start_loc
        meta.seq_lens.zero_()[:count] = theirs.seq_lens
        meta.block_table.zero_()[:count, : theirs.block_table.shape[1]] = theirs.block_table
        meta.slot_mapping.fill_(-1)[: theirs.slot_mapping.shape[0]] = theirs.slot_mapping


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_captured_launch_serves_other_lengths(backend: type[AttentionBackend], kind: str) -> None:
    spec = make_spec(8, 2, 128)
    lengths: list[list[tuple[int, int]]]
    if kind == "decode":
        lengths = [[(1, 40)], [(1, 900), (1, 3), (1, 511)], [(1, i * 100) for i in range(8)], [(1, 0), (1, 1)]]
    else:
        lengths = [[(60, 0)], [(1, 900), (40, 100), (1, 2), (7, 7)], [(0, 5), (1, 64)], [(5, 600)]]
    batches = [make_batch(spec, one, dtype=torch.bfloat16, device="cuda", seed=seed) for seed, one in enumerate(lengths)]
    usable(backend, batches[0])
    static = Static(8 if kind == "decode" else 64, 8, 64, 400, batches[0])
    if kind == "decode":
        static.metadata = replace(static.metadata, max_query_len=1)
    module = backend(spec)

    def step() -> None:
        module.write_kv(static.key, static.value, static.cache, static.metadata.slot_mapping)
        module.forward(static.query, static.cache, static.out, static.metadata)

    static.load(batches[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        static.load(batch)
        graph.replay()
        out, actual = static.out.double().cpu(), batch.num_actual_tokens
        error = float((out[:actual] - batch.expected[:actual]).norm() / batch.expected[:actual].norm())
        assert error < TOLERANCE[torch.bfloat16]
        assert bool((out[actual:] == 0).all())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_call_never_synchronises(backend: type[AttentionBackend]) -> None:
    spec = make_spec(8, 2, 128)
    batch = make_batch(spec, BATCHES["mixed"], dtype=torch.bfloat16, device="cuda", padded_rows=2).without_host()
    usable(backend, batch)
    module, out = backend(spec), torch.empty_like(batch.query)
    for attempt in range(2):
        torch.cuda.synchronize()
        with no_waiting() if attempt else torch.no_grad():  # the first call compiles and loads
            module.write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
            module.forward(batch.query, batch.cache, out, batch.metadata)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("backend", [TritonPaged, TorchReference], ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rotation_equals_float64(backend: type[AttentionBackend], dtype: torch.dtype, heads: Heads) -> None:
    projection = project(heads, SLOTS["padded"], dtype=dtype, device="cuda")
    projection.run(backend(make_spec()))
    check(projection, 1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("backend", [TritonPaged, TorchReference], ids=lambda backend: backend.name)
def test_captured_rotation_serves_other_rows(backend: type[AttentionBackend]) -> None:
    heads = Heads(num_heads=9, num_kv_heads=3, offset=0.0)
    static = project(heads, SLOTS["padded"], dtype=torch.bfloat16, device="cuda")
    module = backend(make_spec())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static.run(module)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.run(module)
    for slots in ([5, -1, 77, 0, 1, 2, -1, 64], [-1] * 8, list(range(8))):
        static.slots.copy_(torch.tensor(slots))
        for tensor in (static.query, static.key, static.value, static.rotation.cos, static.rotation.sin):
            tensor.copy_(torch.randn_like(tensor))
            tensor[static.slots < 0] = NAN
        for tensor in (static.rotated, static.cache.key, static.cache.value):
            tensor.fill_(NAN)
        graph.replay()
        check(static, 3e-2)  # cos and sin are not on a circle here


def test_rotation_compiles_once_for_all_batch_sizes() -> None:
    module = TritonPaged(make_spec())

    def run(count: int) -> None:
        projection = project(Heads(), list(range(count)), dtype=torch.bfloat16, device="cuda")
        projection.run(module)
        check(projection, 1e-2)

    run(3)
    before = len(ROTATE_AND_WRITE.loaded)
    for count in (1, 2, 16, 17, 80):
        run(count)
    assert len(ROTATE_AND_WRITE.loaded) == before


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_prompts_and_decodes_by_different_kernels(lengths: list[tuple[int, int]]) -> None:
    spec = make_spec(9, 3, 64)
    batch = make_batch(spec, lengths, dtype=torch.bfloat16, device="cuda", padded_requests=3, padded_rows=9).without_host()
    usable(FlashTriton, batch)
    batch.check(FlashTriton(spec), TOLERANCE[torch.bfloat16])


def test_decodes_that_fill_the_device() -> None:
    """64 requests on 8 KV heads: a single split, no shared schedule."""
    spec = make_spec(16, 8, 128)
    batch = make_batch(spec, BATCHES["64 decodes"], dtype=torch.bfloat16, device="cuda").without_host()
    usable(FlashAttention3, batch)
    assert batch.metadata.max_seq_len <= 4096
    batch.check(FlashAttention3(spec), TOLERANCE[torch.bfloat16])


def test_layers_share_one_schedule() -> None:
    """Two layers under one metadata object, in a graph that serves other lengths than those of its capture."""
    spec = make_spec(8, 2, 128)
    batches = [make_batch(spec, [(1, length)] * 4, dtype=torch.bfloat16, device="cuda", seed=length) for length in (900, 30)]
    usable(FlashAttention3, batches[0])
    statics = [Static(4, 4, 64, 400, batches[0]) for _ in range(2)]
    metadata = replace(statics[0].metadata, max_query_len=1, may_pad=False)
    module = FlashAttention3(spec)
    if module._library is None:
        pytest.skip("the package has no schedule of its own")
    calls, made = 0, module._schedule

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return made(*arguments)

    module._schedule = counted  # type: ignore[method-assign]

    def step() -> None:
        for static in statics:
            module.write_kv(static.key, static.value, static.cache, metadata.slot_mapping)
            module.forward(static.query, static.cache, static.out, metadata)

    graph = torch.cuda.CUDAGraph()
    for batch in (batches[0], *batches, batches[0]):
        for static in statics:
            static.load(batch)
        if calls == 0:
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step()
            assert calls == 2  # the warm-up's and the graph's own
        graph.replay()
        for static in statics:
            error = float((static.out.double().cpu() - batch.expected).norm() / batch.expected.norm())
            assert error < TOLERANCE[torch.bfloat16]
    assert calls == 2


def test_reference_with_host_lengths() -> None:
    batch = make_batch(make_spec(8, 2, 128), BATCHES["mixed"], dtype=torch.bfloat16, device="cuda", padded_rows=2)
    batch.check(TorchReference(batch.spec), TOLERANCE[torch.bfloat16])


def test_changing_counts_compile_nothing() -> None:
    """Sizes of 1, of multiples of 16 and others share one kernel."""
    spec = make_spec(8, 2, 64)
    backend = TritonPaged(spec)

    def compiled() -> int:
        return sum(len(launcher.loaded) for launcher in (PAGED_ATTENTION, WRITE_KV))

    def run(count: int, padded: int) -> None:
        batch = make_batch(spec, [(1, 20)] * count, dtype=torch.bfloat16, device="cuda", padded_requests=padded, padded_rows=padded)
        batch.without_host().check(backend, TOLERANCE[torch.bfloat16])

    run(3, 0)
    before = compiled()
    for count, padded in ((1, 0), (2, 14), (16, 0), (17, 4), (32, 32)):
        run(count, padded)
    assert compiled() == before


def test_selection_names_its_reason() -> None:
    spec = make_spec(8, 2, 128)
    backend, reason = select_backend(spec, torch.bfloat16, torch.device("cuda"), 16)
    wanted = "triton_paged" if FlashAttention3.why_not(spec, torch.bfloat16, torch.device("cuda"), 16) else "flash_triton"
    assert backend.name == wanted
    assert reason.startswith(f"{wanted}: first that can serve the layer on cuda")


def test_times_beside_the_floor() -> None:
    """Prints the table; asserts only what would be a blunder."""
    from bench.attention import decode_shapes, prefill_shapes, table

    rows = table(decode_shapes([1, 8, 64, 256], [128, 1024, 8192], [16]), ["triton_paged"])
    rows += table(prefill_shapes([1024, 2048, 4096, 8192], [64]), ["triton_paged"])
    print()
    print(*rows, sep="\n")
    assert rows[-1].measured_us < 10 * rows[-1].floor_us
