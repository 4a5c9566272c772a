"""What is decided around the FlashAttention library; the library itself needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rung.attention import AttentionMetadata, KVCache
from rung.attention.backends import flash_triton
from rung.attention.backends.flash_attn import FlashAttention3, most_splits
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.triton_paged import TritonPaged
from tests.attention.cases import make_batch, make_spec

SPEC = make_spec(32, 8, 128)


def decodes(count: int, longest: int) -> AttentionMetadata:
    return replace(make_batch(make_spec(), [(1, 0)] * count).metadata, max_seq_len=longest)


@pytest.mark.parametrize(("count", "longest", "splits"), [(64, 4096, 1), (17, 4096, 1), (16, 4096, 0), (64, 8192, 0), (1, 128, 0)])
def test_decodes_that_fill_the_device_are_not_split(count: int, longest: int, splits: int) -> None:
    assert most_splits(SPEC, decodes(count, longest), processors=132) == splits


def test_prompts_are_left_to_the_library() -> None:
    assert most_splits(SPEC, replace(decodes(64, 4096), max_query_len=2), processors=132) == 0


def test_the_first_layer_makes_what_the_step_shares() -> None:
    metadata = decodes(1, 16)
    layers = [KVCache(torch.empty(0), torch.empty(0)) for _ in range(3)]
    made: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        made.append(torch.empty(0))
        return made[-1]

    for run in (0, 1):  # a warm-up and a capture
        assert all(metadata.once_a_step("schedule", layer, make) is made[run] for layer in layers)
    assert len(made) == 2
    assert metadata.once_a_step("another", layers[1], make) is made[2]


def test_heads_above_128_decode_through_the_library() -> None:
    spec = replace(SPEC, head_size=256)
    assert FlashTriton.why_not(spec, torch.bfloat16, torch.device("cuda"), 16) == "FlashAttention-3 decodes heads of 256 itself"


@pytest.mark.parametrize(("lengths", "road"), [([(1, 3), (1, 0)], "triton"), ([(1, 3), (2, 0)], "flash")])
def test_decodes_go_through_triton_and_all_else_through_the_library(
    lengths: list[tuple[int, int]], road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(flash_triton, "FlashAttention3", lambda spec: FlashAttention3.__new__(FlashAttention3))
    monkeypatch.setattr(FlashAttention3, "forward", lambda *_: taken.append("flash"))
    monkeypatch.setattr(TritonPaged, "forward", lambda *_: taken.append("triton"))
    batch = make_batch(make_spec(), lengths)
    FlashTriton(batch.spec).forward(batch.query, batch.cache, batch.query, batch.metadata)
    assert taken == [road]
