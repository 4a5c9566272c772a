"""How decodes are cut for the kernel in CUDA C++, what it takes, and its source; no device is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rung.attention import AttentionMetadata, AttentionSpec, KVCache, Rotation
from rung.attention.backends import decode_attention, triton_paged
from rung.attention.backends.decode_attention import (
    DECODE_LENGTHS,
    DecodeLaunch,
    FreshKeys,
    plan_decode,
    why_not_decode,
    why_not_decode_layer,
    why_not_rotated,
)
from rung.attention.backends.decode_kernel import decode_attention_kernel
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.launch_plan import KEYS_A_SPLIT, invariant_launch
from rung.attention.backends.triton_paged import TritonPaged
from rung.attention.base import JOINED, answers_for
from rung.launch import rehearse_launches, why_no_nvrtc
from rung.launch.cuda_source import _compile
from tests.attention.cases import make_spec

LLAMA_8B = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=1.0)
SMALL = AttentionSpec(num_heads=9, num_kv_heads=3, head_size=64, scale=1.0)
E4M3 = torch.float8_e4m3fn
_SHARED = 227 << 10


def constants(spec: AttentionSpec, launch: DecodeLaunch, *, e4m3: bool = False, rotated: bool = False, **others: Any) -> dict[str, Any]:
    group = spec.num_heads // spec.num_kv_heads
    found = {"GROUP": group, "HEAD_SIZE": spec.head_size, "BLOCK_SIZE": 16, "E4M3": e4m3, "FP16": False, "WINDOW": 0, "SOFT_CAP": False}
    found |= {"OUT_SCALED": False, "WARPS": launch.warps, "BLOCKS": launch.blocks, "SLOTS": launch.slots, "PROGRAMMATIC": True}
    return found | {"SETTLED": False, "ROTATED": spec.head_size // 2 if rotated else 0, "WIDE": False, "NORM": False} | others


@pytest.mark.parametrize("spec", [LLAMA_8B, SMALL], ids=["8b", "135m"])
@pytest.mark.parametrize("kept_size", [1, 2])
@pytest.mark.parametrize("max_seq_len", [1, 512, 513, 4096, 4097, 1 << 20])
def test_every_batch_has_a_launch_that_fits(spec: AttentionSpec, kept_size: int, max_seq_len: int) -> None:
    for batch in range(1, 700):
        launch = plan_decode(spec, batch, max_seq_len, kept_size=kept_size)
        assert launch.slots >= 3
        assert launch.blocks in (1, 2, 4, 8)
        assert launch.warps in (1, 2, 4, 8)
        assert decode_attention_kernel.shared_bytes(constants(spec, launch, e4m3=kept_size == 1, rotated=True)) <= _SHARED
        if max_seq_len > 4096:
            assert launch.warps >= 4


def test_256_requests_of_the_8b_shape_are_one_round() -> None:
    for kept_size in (1, 2):
        launch = plan_decode(LLAMA_8B, 256, 4096, kept_size=kept_size)
        shared = decode_attention_kernel.shared_bytes(constants(LLAMA_8B, launch, e4m3=kept_size == 1, rotated=True)) + 1024
        assert launch.warps == launch.blocks == 1
        assert 132 * min(16, _SHARED // shared) >= 256 * 8
        assert "#define RESIDENT 16\n" in decode_attention_kernel.source(constants(LLAMA_8B, launch, e4m3=kept_size == 1, rotated=True))


def test_few_requests_share_a_head_among_blocks_once_they_are_long() -> None:
    assert [plan_decode(LLAMA_8B, batch, 4096, kept_size=2).blocks for batch in (1, 2, 4, 8, 16)] == [8, 4, 2, 2, 1]
    assert [plan_decode(LLAMA_8B, batch, 512, kept_size=2).blocks for batch in (1, 8)] == [1, 1]


def test_plans_change_where_a_repeated_break_looks() -> None:
    """`launch_key` rounds lengths to what `KEYS_A_SPLIT` divides, and a rehearsal tries `DECODE_LENGTHS`."""
    for batch in (1, 3, 8, 40, 64, 129, 256):
        plans = [plan_decode(LLAMA_8B, batch, length, kept_size=2) for length in range(1, 6000)]
        changes = [length for length in range(1, 5999) if plans[length] != plans[length - 1]]  # the longest that still has the plan before
        assert all(length % KEYS_A_SPLIT == 0 for length in changes)
        assert {plans[0], plans[-1], *(plans[length - 1] for length in DECODE_LENGTHS)} == set(plans)


def query() -> torch.Tensor:
    return torch.empty(3, 8, 128, dtype=torch.bfloat16, device="meta")


def cache(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (5, 16, 2, 128)) -> KVCache:
    return KVCache(torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape, dtype=dtype, device="meta"))


@pytest.fixture
def _any_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "why_not_decode_layer", lambda *layer: None)


@pytest.mark.usefixtures("_any_layer")
def test_tensors_that_are_not_aligned_are_refused() -> None:
    spec, out = make_spec(8, 2, 128), query()
    assert why_not_decode(query(), cache(), out, spec) is None
    assert why_not_decode(query(), cache(E4M3), out.to(E4M3), spec) is None
    shifted = torch.empty(3, 8, 132, dtype=torch.bfloat16, device="meta")[..., 4:]
    assert "output are not aligned" in str(why_not_decode(shifted, cache(), out, spec))
    assert "output are not aligned" in str(why_not_decode(query(), cache(), shifted, spec))
    odd = KVCache(*(half[..., 4:132] for half in (cache(shape=(5, 16, 2, 136)).key, cache(shape=(5, 16, 2, 136)).value)))
    assert why_not_decode(query(), odd, out, spec) == "keys are not aligned to 16 bytes"
    assert why_not_decode(query(), cache(E4M3, (5, 16, 2, 136)), out, spec) == "keys are not aligned to 16 bytes"


def fresh(**change: Any) -> FreshKeys:
    key = torch.empty(3, 2, 128, dtype=torch.bfloat16, device="meta")
    angles = torch.empty(3, 1, 64, dtype=torch.bfloat16, device="meta")
    rotation = Rotation(**{"cos": angles, "sin": angles, **change})
    return FreshKeys(key=key, value=key, rotation=rotation, slot_mapping=torch.empty(3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"cos": torch.empty(3, 1, 64), "sin": torch.empty(3, 1, 64)}, None),
        ({"cos": torch.empty(3, 1, 24), "sin": torch.empty(3, 1, 24)}, "24 pairs of a head are rotated, no multiple of 16"),
        ({"cos": torch.empty(3, 1, 64).half(), "sin": torch.empty(3, 1, 64).half()}, "cosines are of dtype torch.float16"),
        ({"sin": torch.empty(3, 1, 64)}, "cosines are of dtype torch.bfloat16"),
        ({"cos": torch.empty(3, 1, 65)[..., 1:], "sin": torch.empty(3, 1, 65)[..., 1:]}, "rows of cosines are not aligned"),
        ({"query_weight": torch.empty(128), "key_weight": torch.empty(128)}, "weights of the norm are of another dtype, or not aligned"),
    ],
)
def test_rotations_that_it_does_not_know(change: dict[str, Any], reason: str | None) -> None:
    assert why_not_rotated(query(), fresh(**change)) == reason


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (make_spec(8, 2, 80), torch.bfloat16, "head size 80 is not one of 64, 128"),
        (make_spec(18, 2, 128), torch.bfloat16, "9 query heads a KV head are above 8"),
        (make_spec(8, 2, 128), torch.float32, "torch.float32 is not one of torch.bfloat16, torch.float16"),
    ],
)
def test_layers_that_it_does_not_take(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec, dtype: torch.dtype, reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not_decode_layer.__wrapped__(spec, dtype, torch.device("cuda", 0)) == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert (
        why_not_decode_layer.__wrapped__(make_spec(8, 2, 128), torch.bfloat16, torch.device("cuda", 0))
        == "it is for compute capability 9.0"
    )


def metadata(**change: Any) -> AttentionMetadata:
    ints = torch.empty(4, dtype=torch.int32, device="meta")
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    found = {"query_start_loc": ints, "seq_lens": ints[:3], "block_table": ints[:3, None], "slot_mapping": slots, "num_requests": 3}
    return AttentionMetadata(**{**found, "num_actual_tokens": 3, "max_query_len": 1, "max_seq_len": 64, "settled": True, **change})


@pytest.mark.usefixtures("_any_layer")
@pytest.mark.parametrize(
    ("backend", "change", "launches"),
    [
        (TritonPaged, {}, ["decode_attention_kernel"]),
        (TritonPaged, {"settled": False}, ["decode_attention_kernel"]),
        (TritonPaged, {"max_query_len": 2}, []),
        (TritonPaged, {"num_requests": 0}, []),
        (lambda spec: TritonPaged(spec, batch_invariant=True), {}, []),
    ],
)
def test_a_rotation_is_joined_for_decodes(
    monkeypatch: pytest.MonkeyPatch, backend: Callable[[AttentionSpec], TritonPaged], change: dict[str, Any], launches: list[str]
) -> None:
    monkeypatch.setattr(triton_paged, "multiprocessors", lambda device: 132)
    made, where, out = fresh(), metadata(**change), query()
    with rehearse_launches(90) as rehearsal:
        taken = backend(make_spec(8, 2, 128)).rotate_and_attend(query(), made.key, made.value, made.rotation, cache(), out, where)
    assert taken == bool(launches)
    assert [launcher.name for launcher, _, _ in rehearsal.wanted.values()] == launches
    for _, specialisation, options in rehearsal.wanted.values():
        assert (specialisation.constants["ROTATED"], specialisation.constants["GROUP"]) == (64, 4)
        assert specialisation.constants["SETTLED"] == where.settled
        assert options["launch_pdl"]


def test_backends_of_ours_are_asked_for_both() -> None:
    assert all(answers_for(backend, "rotate_and_attend", JOINED) for backend in (TritonPaged, FlashTriton))


@pytest.mark.parametrize("backend", [TritonPaged, FlashTriton])
def test_a_rotation_is_left_to_attention_where_the_kernel_takes_the_layer(
    backend: type[TritonPaged], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decode_attention, "why_no_nvrtc", lambda: None)
    monkeypatch.setattr(triton_paged, "why_not_decode_layer", why_not_decode_layer.__wrapped__)
    monkeypatch.setattr(decode_attention.DECODE, "road", "prebound", raising=False)
    device, dtype = torch.device("cuda", 0), torch.bfloat16

    def joins(spec: AttentionSpec, dtype: torch.dtype = dtype, **options: Any) -> bool:
        one = backend.__new__(backend)  # no library is here
        TritonPaged.__init__(one, spec, **options)
        return one.joins_rotation(dtype, device)

    assert joins(make_spec(8, 2, 128))
    assert not joins(make_spec(8, 2, 80))
    assert not joins(make_spec(8, 2, 128), torch.float32)
    assert not joins(make_spec(8, 2, 128), batch_invariant=True)
    assert not joins(make_spec(8, 2, 128), launch=invariant_launch(make_spec(8, 2, 128), 2))


@pytest.mark.skipif(why_no_nvrtc() is not None, reason="needs NVRTC")
@pytest.mark.parametrize(("rotated", "settled"), [(False, False), (True, False), (True, True)], ids=["apart", "joined", "settled"])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("spec", [LLAMA_8B, SMALL], ids=["8b", "135m"])
def test_it_compiles(spec: AttentionSpec, e4m3: bool, rotated: bool, settled: bool) -> None:
    launches = {plan_decode(spec, batch, length, kept_size=1 if e4m3 else 2) for batch in (1, 8, 64, 256) for length in (512, 8192)}
    for launch in launches:
        source = decode_attention_kernel.source(constants(spec, launch, e4m3=e4m3, rotated=rotated, SETTLED=settled))
        assert len(_compile(decode_attention_kernel.name, source, 90)) > 1000
    others = {"WINDOW": 100, "SOFT_CAP": True, "FP16": True, "OUT_SCALED": True, "WIDE": rotated, "NORM": rotated, "SETTLED": settled}
    more = constants(replace(spec, sliding_window=100), launch, e4m3=e4m3, rotated=rotated, **others)
    assert len(_compile(decode_attention_kernel.name, decode_attention_kernel.source(more), 90)) > 1000
