"""Attention breaks of piecewise replays as launches alone: bit-equal to their Python, with kernels that join shares of keys, windows, and
requests that come, go and are preempted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rung.runner import RunnerConfig, SamplingParams, build_engine
from rung.runner.graph_forward import GraphForward
from tests.gpu.sync_debug import no_waiting
from tests.gpu.test_kv_groups import SMALL, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def both_ways(**options: Any) -> tuple[list[Any], list[Any], dict[str, int]]:
    """What requests get from one engine with the Python of every break, then with launches alone, and the counts of the second run."""
    config = RunnerConfig(
        max_num_requests=8,
        max_num_tokens=64,
        max_model_len=320,
        num_blocks=options.pop("num_blocks", 200),
        graphs="piecewise",
        capture_sizes=(1, 2, 4, 8, 16, 32, 64),
        prefix_cache=False,
        **options,
    )
    engine, runner, _ = build_engine(small_model(), config)
    assert isinstance(runner.forward, GraphForward)
    manager = runner.forward.manager
    programs = [manager.program(descriptor) for descriptor in manager.captured]
    repeats = [program._repeats for program in programs]
    assert all(repeats)

    def run() -> list[Any]:
        chance = random.Random(1)
        prompts = [[chance.randrange(SMALL.vocab_size) for _ in range(chance.choice((1, 7, 40, 150, 200)))] for _ in range(14)]
        params = [
            SamplingParams(max_tokens=10 + 7 * i % 60, ignore_eos=True, temperature=0.7, seed=i, logprobs=2 if i % 3 else None)
            for i in range(len(prompts))
        ]
        manager.poison()
        return [(one.token_ids, one.logprobs) for one in engine.generate(prompts, params)]

    for program in programs:
        program._repeats = None
    plain = run()
    for program, one in zip(programs, repeats, strict=True):
        program._repeats = one
    before = runner.counters.snapshot()
    found = run()
    engine.executor.shutdown()
    return plain, found, {name: count - before.get(name, 0) for name, count in runner.counters.snapshot().items()}


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8"}, {"num_blocks": 60}], ids=["plain", "an e4m3 cache", "blocks for a few requests"]
)
def test_tokens_and_their_probabilities_are_bit_equal(options: dict[str, Any]) -> None:
    plain, found, counted = both_ways(attention_backend="triton_paged", **options)
    assert found == plain
    assert counted["repeated_breaks"] > counted["recorded_breaks"] > 0
    assert counted["repeated_breaks"] + counted["recorded_breaks"] == SMALL.num_layers * counted["step.piecewise.best"]


def test_the_default_backend_repeats_decodes() -> None:
    plain, found, counted = both_ways()
    assert found == plain
    assert counted["repeated_breaks"] > 0
    assert counted.get("python_break.other_work", 0) == 0


def test_a_repeated_step_does_not_wait_for_the_device() -> None:
    config = RunnerConfig(max_num_requests=4, max_num_tokens=64, max_model_len=320, graphs="piecewise", attention_backend="triton_paged")
    engine, runner, _ = build_engine(small_model(), config)
    for first in range(4):
        engine.add_request([first, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    with runner.counters.expect(recorded_breaks=0, repeated_breaks=SMALL.num_layers), no_waiting():
        runner.execute_model(engine.scheduler.schedule())
    runner.sample_tokens()
    engine.executor.shutdown()
