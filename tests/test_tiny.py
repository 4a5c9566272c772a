"""The whole way in seconds: trace, split, compile, store, load, capture, replay, generate; and a module that is no language model."""

from __future__ import annotations

import torch
from torch import nn

import rung
from rung.counters import Count
from rung.models import random_model
from rung.runner import RunnerConfig, SamplingParams, build_engine

PROMPTS = [[5, 6, 7], [11] * 9, [3]]


def generate(graphs: str, *, eager: bool = False) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    config = RunnerConfig(
        max_num_requests=4,
        max_num_tokens=16,
        max_model_len=32,
        num_blocks=16,
        long_prefill_chunk=4,
        graphs=graphs,  # type: ignore[arg-type]
        capture_sizes=(4, 16),
        lazy_capture=True,
        eager=eager,
    )
    engine, runner, _ = build_engine(random_model("tiny", seed=3), config)
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    return [completion.token_ids for completion in completions], dict(runner.counters)


def test_a_language_model_from_trace_to_tokens() -> None:
    expected, _ = generate("none", eager=True)
    cold, counts = generate("full_and_piecewise")
    assert cold == expected
    assert counts[Count.DYNAMO_TRACES] == 1
    assert counts[Count.UNIQUE_PIECES] < counts[Count.PIECES]
    assert counts["step.full.best"] > 0
    assert counts["step.piecewise.mixed_batch"] > 0

    warm, counts = generate("full_and_piecewise")
    assert warm == expected
    assert counts.get(Count.DYNAMO_TRACES, 0) == counts.get(Count.INDUCTOR_COMPILES, 0) == 0
    assert counts[Count.PLAN_HITS] == 1


def test_a_module_that_is_no_language_model() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2)).eval().requires_grad_(False)
    wrapped = rung.wrap(nn.Sequential(*module).eval(), dynamic={"input": {0: "rows"}}, graphs="auto", pad=("rows",), maximum=8)
    for rows in (3, 8, 1):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(wrapped(x), module(x))
    assert wrapped.rung.counters[Count.REPLAYS] == 3
