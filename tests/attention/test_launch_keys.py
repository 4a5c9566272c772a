"""Batches with equal launch keys are given the same kernels, grids and numbers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rung.attention import Attention, AttentionBackend, AttentionCall, AttentionMetadata, AttentionSpec, HostMetadata, KVCache, LaunchKeys
from rung.attention.backends import decode_attention, rotary_write, triton_paged
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.launch_plan import Launch
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.backends.triton_paged import TritonPaged
from rung.attention.layer import rotate_and_attend
from rung.context import ForwardContext, set_forward_context
from rung.launch import TritonLauncher

MOST_REQUESTS, BLOCKS = 16, 1024
SPECS = {
    "plain": AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, scale=0.1),
    "window": AttentionSpec(num_heads=8, num_kv_heads=4, head_size=128, scale=0.1, sliding_window=700),
}


class Launches:
    """The launches of our attention kernels, with addresses for tensors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        ours = (*vars(triton_paged).values(), decode_attention.DECODE, rotary_write.ROTATE_AND_WRITE)
        for launcher in (one for one in ours if isinstance(one, TritonLauncher)):
            patch.setattr(launcher, "run", self._run(launcher.name))
        patch.setattr(triton_paged, "multiprocessors", lambda device: 132)
        patch.setattr(triton_paged, "workspace", lambda shape, dtype, device: torch.Size(shape))

    def _run(self, name: str) -> Any:
        def run(grid: Any, *values: Any, **named: Any) -> None:
            numbers = tuple((one.data_ptr(), one.shape) if isinstance(one, torch.Tensor) else one for one in values)
            self.seen.append((name, grid, numbers, tuple(named.items())))

        return run

    @contextmanager
    def of(self) -> Iterator[list[Any]]:
        self.seen = []
        yield self.seen


class Batches:
    """Random batches of one size over the same memory."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.starts = torch.zeros(MOST_REQUESTS + 1, dtype=torch.int32)
        self.lens = torch.zeros(MOST_REQUESTS, dtype=torch.int32)
        self.table = torch.zeros(MOST_REQUESTS, BLOCKS, dtype=torch.int32)
        self.slots = torch.zeros(num_tokens, dtype=torch.int64)

    def draw(self, rng: random.Random) -> AttentionMetadata:
        count = rng.choice((1, 2, 5, self.num_tokens)) if rng.random() < 0.7 else rng.randint(1, self.num_tokens)
        query = [1] * count
        if rng.random() < 0.5:
            query[rng.randrange(count)] = self.num_tokens - count + 1
        longest = rng.choice((1, 100, 128, 129, 512, 513, 700, 701, 4096, 4097, 8000))
        history = [0 if rng.random() < 0.5 else rng.randint(0, longest) for _ in query]
        lens = np.asarray([q + h for q, h in zip(query, history, strict=True)], np.int32)
        return AttentionMetadata(
            query_start_loc=self.starts[: count + 1],
            seq_lens=self.lens[:count],
            block_table=self.table[:count],
            slot_mapping=self.slots,
            num_requests=count,
            num_actual_tokens=sum(query),
            max_query_len=max(query),
            max_seq_len=int(lens.max()),
            host=HostMetadata(query_start_loc=np.concatenate([[0], np.cumsum(query)]).astype(np.int32), seq_lens=lens),
        )


def one_layer(backend: AttentionBackend, spec: AttentionSpec, num_tokens: int, fresh: bool) -> tuple[AttentionCall, Attention]:
    layer = Attention("layer", spec)
    cache = torch.zeros(2, 16, spec.num_kv_heads, spec.head_size, dtype=torch.bfloat16)
    layer.kv_cache, layer.backend = KVCache(cache, cache), backend
    query = torch.zeros(num_tokens, spec.num_heads, spec.head_size, dtype=torch.bfloat16)
    key = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_size, dtype=torch.bfloat16)
    return AttentionCall(query, key, key, torch.zeros_like(query), "layer", fresh=fresh), layer


def context_of(layer: Attention, metadata: AttentionMetadata) -> ForwardContext:
    return ForwardContext(attention_metadata={"layer": metadata}, attention_layers={"layer": layer})


FIXED = Launch(block_q=4, block_m=16, block_n=32, splits=1, num_warps=4, num_stages=3)


@pytest.mark.parametrize("kind", ["plain", "invariant", "fixed", "cuda"])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equal_keys_are_equal_launches(
    spec: AttentionSpec, num_tokens: int, fresh: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a launch that is given for all batches, and of decodes in CUDA C++."""
    monkeypatch.setattr(decode_attention, "why_not_decode_layer", lambda *layer: None if kind == "cuda" else "another device")
    launches, rng, batches = Launches(monkeypatch), random.Random(num_tokens), Batches(num_tokens)
    backend = TritonPaged(spec, FIXED if kind == "fixed" else None, batch_invariant=kind == "invariant")
    call, layer = one_layer(backend, spec, num_tokens, fresh)
    assert layer.kv_cache is not None
    found: dict[Any, list[Any]] = defaultdict(list)
    for _ in range(400):
        metadata = batches.draw(rng)
        keys = LaunchKeys.of([call], context_of(layer, metadata))
        assert keys is not None
        with launches.of() as seen:
            if fresh:
                backend.forward_given_keys(call.query, call.key, call.value, layer.kv_cache, call.out, metadata)
            else:
                backend.forward(call.query, layer.kv_cache, call.out, metadata)
        assert seen
        found[keys.now(context_of(layer, metadata))].append(seen)
    assert max(map(len, found.values())) > 10
    assert all(seen == group[0] for group in found.values() for seen in group)


@pytest.mark.parametrize("kind", ["plain", "invariant", "cuda"])
@pytest.mark.parametrize("num_tokens", [1, 7, 16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equal_keys_are_equal_launches_of_a_break_that_rotates_too(
    spec: AttentionSpec, num_tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled batches and those with fewer slots than rows among them. Where one kernel does both, decodes are that one."""
    monkeypatch.setattr(decode_attention, "why_not_decode_layer", lambda *layer: None if kind == "cuda" else "another device")
    launches, rng, batches = Launches(monkeypatch), random.Random(num_tokens), Batches(num_tokens)
    call, layer = one_layer(TritonPaged(spec, batch_invariant=kind == "invariant"), spec, num_tokens, False)
    angles = torch.zeros(num_tokens, 1, spec.head_size // 2)
    rotated = torch.zeros_like(call.query)
    found: dict[Any, list[Any]] = defaultdict(list)
    for _ in range(400):
        metadata = batches.draw(rng)
        slots = metadata.slot_mapping[: rng.choice((num_tokens, num_tokens, metadata.num_requests))]
        metadata = replace(metadata, settled=rng.random() < 0.3, slot_mapping=slots)
        context = context_of(layer, metadata)
        keys = LaunchKeys.of([call], context)
        assert keys is not None
        with launches.of() as seen, set_forward_context(context):
            rotate_and_attend(
                call.query, call.key, call.value, rotated, angles, angles, "layer", given=(call.key, call.value), out=call.out
            )
        assert [name for name, *_ in seen].count("rotate_and_write_kernel") in (0, 1)
        if kind == "cuda" and metadata.max_query_len == 1 and len(slots) == num_tokens:
            assert [name for name, *_ in seen] == ["decode_attention_kernel"]
        found[keys.now(context)].append(seen)
    assert max(map(len, found.values())) > 5
    assert all(seen == group[0] for group in found.values() for seen in group)


class Newer(TritonPaged):
    """Overrides the rotation and says nothing of its launches."""

    def rotate_and_write(self, *arguments: Any) -> None:
        super().rotate_and_write(*arguments)


def test_a_longest_request_that_grows_seldom_changes_a_key() -> None:
    spec, batches = SPECS["plain"], Batches(4)
    call, layer = one_layer(TritonPaged(spec), spec, 4, False)
    metadata = replace(batches.draw(random.Random(0)), max_query_len=1, host=None)
    keys = LaunchKeys.of([call], context_of(layer, metadata))
    assert keys is not None
    found = {keys.now(context_of(layer, replace(metadata, max_seq_len=length))) for length in range(1, 1281)}
    assert len(found) == 10


def test_flash_attention_answers_for_decodes_alone() -> None:
    spec, batches = SPECS["plain"], Batches(4)
    backend = FlashTriton.__new__(FlashTriton)  # no library is here
    TritonPaged.__init__(backend, spec)
    call, layer = one_layer(backend, spec, 4, True)
    metadata = batches.draw(random.Random(0))
    keys = LaunchKeys.of([call], context_of(layer, metadata))
    assert keys is not None
    (decodes,) = keys.now(context_of(layer, replace(metadata, max_query_len=1)))
    assert decodes is not None
    assert keys.now(context_of(layer, replace(metadata, max_query_len=2))) == (None,)


@pytest.mark.parametrize("backend", [TorchReference, Newer])
def test_other_backends_say_nothing(backend: type[AttentionBackend]) -> None:
    spec, batches = SPECS["plain"], Batches(4)
    call, layer = one_layer(backend(spec), spec, 4, False)
    context = context_of(layer, batches.draw(random.Random(0)))
    keys = LaunchKeys.of([call], context)
    assert keys is not None
    assert keys.now(context) == (None,)


def test_a_layer_without_a_cache_has_no_keys() -> None:
    spec, batches = SPECS["plain"], Batches(4)
    call, layer = one_layer(TorchReference(spec), spec, 4, False)
    layer.kv_cache = None
    assert LaunchKeys.of([call], context_of(layer, batches.draw(random.Random(0)))) is None
