"""After a rehearsal no step asks for a kernel that it did not ask for. Tensors have no memory, launches are noted, nothing is compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rung import torch_compat
from rung.attention import BatchBounds
from rung.attention.backends import decode_attention, rotary_write, triton_paged
from rung.attention.backends.triton_paged import TritonPaged
from rung.context import set_forward_context
from rung.graphs import Dispatch, exact
from rung.launch import Rehearsal, rehearse_launches
from rung.models.build import empty_model
from rung.models.config import LlamaConfig
from rung.passes.kernels import support
from rung.runner import RunnerConfig
from rung.runner.batch import dummy_batch
from rung.runner.forward import EagerForward
from rung.runner.kernel_images import NoTransfer
from rung.runner.model_runner import ModelRunner
from rung.runner.ops import TritonStepOps, triton_decode
from rung.runner.ops.decode_base import RowSampling
from rung.runner.ops.triton_decode import ChunkTiles, TritonDecodeOps
from rung.runner.rehearsal import padded_decodes, query_lens_of, rehearse

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch_compat.triton_interpreted(), reason="needs Triton, not its interpreter"
)
PADDED = 48  # rows to which a batch of any number of requests but one is padded
CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=256,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    max_position_embeddings=1024,
)


@pytest.fixture(params=["triton", "cuda"])
def rehearsed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, Any, Rehearsal]]:
    """A runner of a device that is not there, inside its rehearsal, which is done; decodes by a kernel in Triton or in CUDA C++."""
    monkeypatch.setattr(triton_paged, "multiprocessors", lambda device: 4)
    for module in (triton_paged, rotary_write):
        monkeypatch.setattr(module, "launches_early", lambda device: True)
    monkeypatch.setattr(decode_attention, "why_not_decode_layer", lambda *layer: None if request.param == "cuda" else "another device")
    monkeypatch.setattr(support, "_why_not_device", lambda device: None)
    tiles = [(most, ChunkTiles(block=256, steps=most, num_warps=4)) for most in (1, 4, 64)]
    monkeypatch.setattr(triton_decode, "_TILES", tiles)  # so that few rows take several kernels
    model = empty_model(CONFIG, torch.bfloat16, "meta")
    config = RunnerConfig(max_num_requests=6, max_num_tokens=80, max_model_len=1024, graphs="piecewise", capture_sizes=(1, PADDED, 72))
    with torch.no_grad(), rehearse_launches(90) as rehearsal:
        runner = ModelRunner(
            model,
            config,
            backend=TritonPaged,
            forward=EagerForward(model),
            ops=TritonStepOps(),
            num_blocks=2,
            transfer=NoTransfer(torch.device("meta")),
        )
        assert rehearse(runner, model) > 4
        names = {launcher.name for launcher, _, _ in rehearsal.wanted.values()}
        assert ("decode_attention_kernel" in names) == (request.param == "cuda")
        yield runner, model, rehearsal


def test_no_step_asks_for_another_kernel(rehearsed: tuple[ModelRunner, Any, Rehearsal]) -> None:
    runner, module, rehearsal = rehearsed
    known = set(rehearsal.wanted)
    cases = [
        (tokens, requests, longest)
        for tokens in (*range(1, 13), *range(13, 81, 9))
        for requests in {1, min(6, tokens)}
        for longest in (1, 512, 513, 1024)
    ]
    for tokens, requests, longest in cases:
        most = -(-tokens // requests)
        bounds = BatchBounds(num_tokens=tokens, num_requests=requests, max_query_len=most, max_seq_len=max(most, longest))
        batch = dummy_batch(query_lens_of(bounds), decode=most == 1, max_seq_len=bounds.max_seq_len)
        step = runner.prepare(batch, Dispatch(exact(batch.shape)))
        with set_forward_context(step.context):
            hidden = module(runner.buffers.input_ids[:tokens], runner.buffers.positions[:tokens])
        module.compute_logits(hidden)
    assert set(rehearsal.wanted) == known


@pytest.mark.parametrize("longest", [1, 512, 513, 1024])
def test_no_decodes_that_are_padded_ask_for_another_kernel(rehearsed: tuple[ModelRunner, Any, Rehearsal], longest: int) -> None:
    runner, module, rehearsal = rehearsed
    known = set(rehearsal.wanted)
    for requests in range(2, 7):
        batch = dummy_batch(np.ones(requests, np.int32), decode=True, max_seq_len=longest)
        step = runner.prepare(batch, Dispatch(replace(exact(batch.shape), num_tokens=PADDED)))
        with set_forward_context(step.context):
            module(runner.buffers.input_ids[:PADDED], runner.buffers.positions[:PADDED])
    assert set(rehearsal.wanted) == known


@pytest.mark.parametrize(
    ("change", "rows"),
    [({}, 8), ({"graphs": "none"}, 6), ({"capture_sizes": (4,)}, 6), ({"capture_sizes": (4, 48, 64)}, 48), ({"max_num_tokens": 7}, 7)],
)
def test_rows_of_padded_decodes(change: dict[str, Any], rows: int) -> None:
    assert padded_decodes(RunnerConfig(**{"max_num_requests": 6, "max_num_tokens": 80, "graphs": "piecewise", **change})) == rows


def test_no_sampling_asks_for_another_kernel(rehearsed: tuple[ModelRunner, Any, Rehearsal]) -> None:
    runner, module, rehearsal = rehearsed
    known = set(rehearsal.wanted)
    for rows in range(1, 7):
        logits = module.compute_logits(torch.empty(rows, CONFIG.hidden_size, dtype=torch.bfloat16, device="meta"))
        batch = dummy_batch(np.ones(rows, np.int32), decode=True)
        slots, lens = runner.buffers.idx_mapping[:rows], runner.buffers.seq_lens[:rows]
        tokens = runner.sampler.sample(logits, slots, lens, batch).tokens
        filtered = runner.ops.sampling.filter(logits, slots, runner.sampler._filters)
        runner.ops.decode.pick(filtered, slots, lens, runner.sampler.rows, any_random=True)
        for top in range(33):
            found = runner.sampler.logprobs_of(logits, tokens, top)
            assert found.top_ids.shape == (rows, top)
    assert set(rehearsal.wanted) == known


def test_no_decode_graph_samples_by_another_kernel(rehearsed: tuple[ModelRunner, Any, Rehearsal]) -> None:
    runner, _, rehearsal = rehearsed
    logits = torch.empty(6, CONFIG.vocab_size, dtype=torch.bfloat16, device="meta")
    runner.decode.rehearse(logits)
    known = set(rehearsal.wanted)
    for rows in range(1, 7):
        runner.ops.decode.sample(logits[:rows], runner.slots, runner.buffers, runner.sampler.rows, runner.decode.state)
    assert set(rehearsal.wanted) == known
    kernels = [launcher.name for launcher, _, _ in rehearsal.wanted.values()]
    assert kernels.count("sample_chunk_kernel") == 3


@pytest.mark.parametrize(("vocab", "divisible"), [(128256, ("logits", "vocab", "logits_stride")), (50257, ("logits",))])
def test_logits_are_read_by_as_many_bytes_as_their_rows_allow(vocab: int, divisible: tuple[str, ...]) -> None:
    idx = torch.empty(2, dtype=torch.int64, device="meta")
    sampling = RowSampling(temperature=idx.float(), seed=idx, stop_ids=idx.unsqueeze(1))
    with rehearse_launches(90) as rehearsal:
        TritonDecodeOps().pick(torch.empty(2, vocab, dtype=torch.bfloat16, device="meta"), idx, idx.int(), sampling, any_random=False)
    found = {launcher.name: specialisation.divisible_by_16 for launcher, specialisation, _ in rehearsal.wanted.values()}
    assert found == {"pick_chunk_kernel": divisible, "pick_row_kernel": ()}
