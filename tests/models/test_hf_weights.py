"""Real weights in unmodified transformers models: wrapped as they are, and on the flat batch through the engine with recorded graphs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung.context import set_forward_context
from rung.counters import Count
from rung.models import find_quickstart
from rung.models.hf import FlatModel
from rung.runner import RunnerConfig, SamplingParams, build_engine
from tests.gemma3 import gemma3_gguf, run_at_random, transformers_gemma3
from tests.greedy import NEAR_TIE, TOKENS, read_reference
from tests.models.harness import bind_dense, context, transformers_gguf
from tests.smollm2 import divergences

pytestmark = pytest.mark.slow
PROMPTS, LAYERS = 6, 3


def smollm2(folder: Path) -> Any:
    return transformers_gguf(find_quickstart())


MODELS: dict[str, Callable[[Path], Any]] = {"smollm2": smollm2, "gemma3": lambda folder: transformers_gemma3(gemma3_gguf(folder))}


@pytest.fixture(scope="module", params=MODELS)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    pytest.importorskip("transformers")
    model = MODELS[request.param](tmp_path_factory.mktemp("weights"))
    return request.param, model


def eager_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def test_wrapped_as_it_is_it_equals_itself(named: tuple[str, Any]) -> None:
    """Its first layers: without cuts the whole is one piece, which takes Inductor minutes."""
    name, whole = named
    model = copy.deepcopy(whole)
    model.model.layers = model.model.layers[:LAYERS]
    prompt = read_reference(name)[4][0]
    model.set_attn_implementation("eager")  # "sdpa" decides on the length
    lengths = (len(prompt), 5, 1)
    calls = [torch.tensor([prompt[:length]]) for length in lengths]
    expected = [eager_logits(model, ids) for ids in calls]
    rung.wrap(model, dynamic={"input_ids": {1: "tokens"}})
    for ids, logits in zip(calls, expected, strict=True):
        torch.testing.assert_close(eager_logits(model, ids), logits, rtol=1e-3, atol=1e-3)
    assert model.rung.counters[Count.DYNAMO_TRACES] == 1
    assert model.rung.counters[Count.EAGER_CALLS] == 0


def test_the_flat_batch_equals_eager_output_and_generates_the_text_of_transformers(named: tuple[str, Any]) -> None:
    name, model = named
    reference = random.Random(0).sample(read_reference(name), PROMPTS)
    ids = torch.tensor(reference[0][0])
    expected = eager_logits(model, ids[None])[0]
    names = list(model.state_dict())
    flat = FlatModel(model)
    bind_dense(flat, len(ids))  # type: ignore[arg-type]
    rows = []
    for start, count in ((0, len(ids) - 1), (len(ids) - 1, 1)):  # a prompt and a step of decoding
        with torch.no_grad(), set_forward_context(context(flat, start, count)):  # type: ignore[arg-type]
            rows.append(flat.compute_logits(flat(ids[start : start + count], torch.arange(start, start + count))))
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-3, atol=1e-3)
    assert list(model.state_dict()) == names

    config = RunnerConfig(
        max_num_requests=8,
        max_num_tokens=64,
        max_model_len=176,
        num_blocks=1 + 22,
        long_prefill_chunk=48,
        graphs="full_and_piecewise",
        capture_sizes=(8, 32, 64),
        lazy_capture=True,
        max_waste=None,
    )
    engine, runner, started = build_engine(flat, config)
    assert started.compile is not None
    assert started.compile.unique_pieces < started.compile.pieces
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    tokens, _ = run_at_random(engine, [prompt for prompt, _ in reference], params, seed=0)
    engine.executor.shutdown()
    assert runner.counters[Count.REPLAYS] > 0
    assert [item for item in divergences(tokens, [told for _, told in reference]) if item.gap >= NEAR_TIE] == []
