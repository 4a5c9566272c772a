"""Attention breaks of piecewise replays as launches alone: bit-equal to their Python, with kernels that join shares of keys, windows, and
requests that come, go and are preempted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from rung.graphs import capture
from rung.models import SHAPES, random_model
from rung.runner import Engine, RunnerConfig, SamplingParams, build_engine
from rung.runner.config import Mode
from rung.runner.graph_forward import GraphForward
from tests.gpu.sync_debug import no_waiting
from tests.gpu.test_kv_groups import SMALL, small_model

# Joined as the shapes of the benchmarks are, so that nothing but our kernels runs between two breaks.
LLAMA = replace(SHAPES["tiny"], vocab_size=1024, hidden_size=256, intermediate_size=512, num_layers=4, head_size=64)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def both_ways(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[Any], list[Any], dict[str, int]]:
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
    engine, runner, _ = build_engine(small_model().to(dtype), config)
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
    "options",
    [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}, {"num_blocks": 60}],
    ids=["plain", "joined", "joined, an e4m3 cache", "an e4m3 cache", "blocks for a few requests"],
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


def kernels_of(step: Callable[[], Any]) -> Counter[str]:
    """Kernels of attention that a step runs, by name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]
    return Counter(name for name in names if "rotate" in name or "attention" in name)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for 9.0")
@pytest.mark.parametrize("backend", ["triton_paged", "auto"])
def test_a_piecewise_decode_rotates_in_the_kernel_that_attends(backend: str) -> None:
    """Once a layer, in the step that is written down and in those that repeat it; a mixed batch runs two kernels."""
    config = RunnerConfig(max_num_requests=4, max_num_tokens=64, max_model_len=320, graphs="piecewise", attention_backend=backend)
    engine, _, _ = build_engine(small_model().bfloat16(), config)
    for first in range(3):
        engine.add_request([first, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(4):
        engine.step()
    for _ in range(2):
        assert kernels_of(engine.step) == {"decode_attention_kernel": SMALL.num_layers}
    engine.add_request(list(range(20)), SamplingParams(max_tokens=60, ignore_eos=True))
    found = kernels_of(engine.step)
    assert found["rotate_and_write_kernel"] == SMALL.num_layers
    assert "decode_attention_kernel" not in found
    engine.executor.shutdown()


def greedy(graphs: Mode, **options: Any) -> list[list[int]]:
    config = RunnerConfig(max_num_requests=4, max_num_tokens=64, max_model_len=320, graphs=graphs, capture_sizes=(1, 2, 4, 64), **options)
    engine, _, _ = build_engine(small_model().bfloat16(), config)
    prompts = [[first, *range(2, 9 * first + 3)] for first in range(1, 6)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.0))
    engine.executor.shutdown()
    return [list(one.token_ids) for one in completions]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}], ids=["plain", "an e4m3 cache"])
def test_piecewise_decodes_give_the_tokens_of_full_ones(options: dict[str, Any]) -> None:
    assert greedy("piecewise", **options) == greedy("full_and_piecewise", **options)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="kernels start early from 9.0 on")
@pytest.mark.parametrize("graphs", ["piecewise", "full_and_piecewise"])
def test_pieces_as_launches_give_the_tokens_of_graphs(graphs: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    module = random_model(LLAMA, dtype=torch.bfloat16, device="cuda")
    prompts = [[first, *range(2, 9 * first + 3)] for first in range(1, 6)]
    limits = {"max_num_requests": 4, "max_num_tokens": 64, "max_model_len": 320, "capture_sizes": (1, 2, 4, 64)}
    config = RunnerConfig(**limits, graphs=graphs, prefix_cache=False)  # so that each generation computes its prompts in the same chunks

    def tokens(engine: Engine) -> list[list[int]]:
        found = engine.generate(prompts, SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.0))
        return [list(one.token_ids) for one in found]

    engine, runner, _ = build_engine(module, config)
    wanted = tokens(engine)
    engine.executor.shutdown()
    assert runner.counters["launched_pieces"] == 0  # small weights
    monkeypatch.setattr(capture, "LAUNCHED_BYTES", 0)
    engine, runner, _ = build_engine(module, config)
    assert runner.counters["launched_pieces"] >= 4 * (LLAMA.num_layers - 1)
    assert isinstance(runner.forward, GraphForward)
    for _ in range(3):
        runner.forward.manager.poison()
        assert tokens(engine) == wanted
    for first in range(4):
        engine.add_request([first, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    with no_waiting():
        runner.execute_model(engine.scheduler.schedule())
    runner.sample_tokens()
    engine.executor.shutdown()
