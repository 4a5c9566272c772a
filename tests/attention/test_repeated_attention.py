"""A model's piecewise steps with attention as launches of earlier steps, kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.attention.backends.triton_paged import why_no_triton
from rung.models import random_model
from rung.runner import RunnerConfig, SamplingParams, build_engine
from rung.runner.graph_forward import GraphForward

runs = pytest.mark.skipif(why_no_triton(torch.device("cpu")) is not None, reason="needs Triton's interpreter (TRITON_INTERPRET=1)")
PROMPTS = [[1, 2, 3], [40, 5], list(range(6, 15)), [77]]


def generate(repeated: bool) -> tuple[list[Any], dict[str, int]]:
    """What four requests of different lengths get in three slots with too few blocks for all of them, and what was counted."""
    config = RunnerConfig(
        max_num_requests=3,
        max_num_tokens=16,
        max_model_len=48,
        num_blocks=4,
        graphs="piecewise",
        capture_sizes=(2, 4, 16),
        attention_backend="triton_paged",
    )
    engine, runner, _ = build_engine(random_model("tiny", seed=3), config)
    assert isinstance(runner.forward, GraphForward)
    manager = runner.forward.manager
    if not repeated:
        for descriptor in manager.captured:
            manager.program(descriptor)._repeats = None
    manager.poison()
    preempted = []
    runner.hooks.before_forward = lambda plan: preempted.extend(plan.preempted_request_ids)  # type: ignore[method-assign]
    params = [SamplingParams(max_tokens=15 - 3 * i, ignore_eos=True, temperature=0.8, seed=i, logprobs=2) for i in range(len(PROMPTS))]
    completions = engine.generate(PROMPTS, params)
    engine.executor.shutdown()
    assert preempted
    return [(one.token_ids, one.logprobs) for one in completions], runner.counters.snapshot()


@runs
def test_requests_that_come_and_go_get_the_same_tokens_bit_by_bit() -> None:
    plain, before = generate(repeated=False)
    found, counted = generate(repeated=True)
    assert found == plain
    assert {name: count for name, count in counted.items() if name.startswith("step.")} == {
        name: count for name, count in before.items() if name.startswith("step.")
    }
    layers, steps = 3, counted["step.piecewise.best"]
    assert counted["repeated_breaks"] + counted["recorded_breaks"] == layers * steps
    assert counted["repeated_breaks"] > counted["recorded_breaks"] > layers
    assert not any(name.startswith("python_break") for name in counted)
    assert "repeated_breaks" not in before
