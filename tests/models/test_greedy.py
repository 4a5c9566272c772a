"""Greedy text of SmolLM2 through compiled pieces and recorded graphs, against transformers' own generate on the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from rung.counters import Count
from rung.models import LoadedModel
from rung.runner import RunnerConfig, SamplingParams, build_engine
from tests.smollm2 import TOPICS, divergences, reference_tokens

TOKENS = 48
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    return [smollm2.tokenizer.apply_chat([{"role": "user", "content": topic}]) for topic in TOPICS]


@pytest.mark.slow
def test_continuous_batch_with_chunked_prefill_equals_generate(
    smollm2: LoadedModel, their_smollm2: Any, prompts: list[list[int]], record_property: Any
) -> None:
    config = RunnerConfig(
        max_num_requests=len(prompts),
        max_num_tokens=64,
        max_model_len=128,
        num_blocks=1 + len(prompts) * 8,
        long_prefill_chunk=16,
        graphs="full_and_piecewise",
        capture_sizes=(4, 8, 16, 20, 32, 48, 64),
        lazy_capture=True,
    )
    engine, runner, start = build_engine(smollm2.module, config)
    assert start.compile is not None
    assert (start.compile.pieces, start.compile.unique_pieces <= 4) == (31, True)
    completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))

    assert max(map(len, prompts)) > 2 * 16, "some prompts must span several chunks"
    assert runner.counters["step.full.best"] > 20
    assert sum(count for name, count in runner.counters.items() if name.startswith("step.piecewise.")) > 2
    assert not [name for name in runner.counters if name.startswith("step.none.")]
    assert runner.counters[Count.DYNAMO_TRACES] + runner.counters[Count.PLAN_HITS] == 1
    reference = [reference_tokens(their_smollm2, prompt, TOKENS) for prompt in prompts]
    found = divergences([completion.token_ids for completion in completions], reference)
    record_property("divergences", [str(item) for item in found])
    assert [item for item in found if item.gap >= NEAR_TIE] == []
