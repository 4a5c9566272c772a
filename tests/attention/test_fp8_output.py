"""Attention whose output is e4m3. The interpreter's kernels write float32 (see `tests/passes/test_fp8_kernels.py`), and torch rounds."""

from __future__ import annotations

import pytest
import torch

from rung.attention import AttentionBackend
from rung.attention.backends.flash_attn import FlashAttention2, FlashAttention3
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.launch_plan import Launch
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.backends.triton_paged import TritonPaged, why_no_triton
from rung.passes.ir.fp8 import E4M3, quant_static_body
from tests.attention.cases import LENGTHS, make_batch, make_spec

CPU, SCALE = torch.device("cpu"), torch.tensor([0.004])
INTERPRETED = pytest.mark.skipif(why_no_triton(CPU) is not None, reason="needs Triton's interpreter")
SPLIT = Launch(block_q=1, block_m=16, block_n=16, splits=3, num_warps=4, num_stages=2)


def whole(backend: AttentionBackend, lengths: str, given: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What `forward_quantised` writes, and the quantisation of what `forward` writes."""
    batch = make_batch(backend.spec, LENGTHS[lengths], padded_rows=3)
    backend.write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
    plain, found = torch.empty_like(batch.query), torch.empty_like(batch.query)
    keys = (batch.key, batch.value) if given else None
    if given:
        backend.forward_given_keys(batch.query, batch.key, batch.value, batch.cache, plain, batch.metadata)
    else:
        backend.forward(batch.query, batch.cache, plain, batch.metadata)
    if isinstance(backend, TorchReference):
        found = found.to(E4M3)
    backend.forward_quantised(batch.query, batch.cache, found, SCALE, batch.metadata, keys)
    return found.to(E4M3), quant_static_body(plain, SCALE)


@pytest.mark.parametrize("given", [False, True], ids=["cache", "given"])
@pytest.mark.parametrize("lengths", ["decode", "prefill", "mixed", "nothing"])
def test_the_reference_quantises_its_output(lengths: str, given: bool) -> None:
    found, wanted = whole(TorchReference(make_spec()), lengths, given)
    assert torch.equal(found.float(), wanted.float())
    assert not found[-3:].float().any()


@INTERPRETED
@pytest.mark.parametrize("given", [False, True], ids=["cache", "given"])
@pytest.mark.parametrize("lengths", ["decode", "prefill", "mixed"])
def test_the_kernel_quantises_its_output(lengths: str, given: bool) -> None:
    found, wanted = whole(TritonPaged(make_spec()), lengths, given)
    assert torch.equal(found.float(), wanted.float())
    assert not found[-3:].float().any()


@INTERPRETED
def test_the_kernel_that_joins_splits_quantises_its_output() -> None:
    found, wanted = whole(TritonPaged(make_spec(), SPLIT), "decode", False)
    assert torch.equal(found.float(), wanted.float())


def test_values_beyond_the_largest_are_clamped() -> None:
    batch = make_batch(make_spec(), [(3, 0)])
    batch.value[:] = 1e4
    TorchReference(batch.spec).write_kv(batch.key, batch.value, batch.cache, batch.metadata.slot_mapping)
    out = torch.empty(batch.query.shape, dtype=E4M3)
    TorchReference(batch.spec).forward_quantised(batch.query, batch.cache, out, SCALE, batch.metadata)
    assert out.float().unique().tolist() == [448.0]


@pytest.mark.parametrize("backend", [FlashAttention3, FlashAttention2, FlashTriton], ids=lambda backend: backend.name)
def test_who_cannot_says_so(backend: type[AttentionBackend]) -> None:
    assert "model's dtype only" in (backend.why_not_fp8_output(CPU) or "")
