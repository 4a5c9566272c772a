"""The KV cache gets what weights, buffers, activations and predicted graphs leave."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rung.attention import attention_layers
from rung.errors import ConfigError, KVCacheTooSmallError
from rung.graphs import ConfiguredMode, GraphMode, Ladder, Reason, Shape, make_backend, plan_descriptors
from rung.graphs.trace import StepTrace
from rung.runner import Engine, InProcessExecutor, ModelRunner, RunnerConfig, SamplingParams, Scheduler, build, build_runner, profile
from rung.runner.config import Mode
from rung.runner.graph_forward import GraphForward
from rung.runner.kv_cache import num_kv_blocks
from rung.runner.kv_groups import KVGroup, kv_groups, most_kv_blocks
from rung.runner.memory_plan import MemoryPlan
from rung.runner.profile import PROFILE_BLOCKS, needs_profile, profile_memory
from rung.runner.step_trace import open_step_trace, recorded_steps, trace_header
from tests.runner.test_graph_forward import DeviceAttention, HandPlan, prompts_of
from tests.runner.tiny import VOCAB, TinyModel

CPU = torch.device("cpu")
ONE_GROUP = (KVGroup(("layer",), None, 100),)


def config_of(**values: Any) -> RunnerConfig:
    sizes: dict[str, Any] = {"max_num_requests": 6, "max_num_tokens": 16, "max_model_len": 64, "block_size": 4}
    return RunnerConfig(**{**sizes, **values})


def make(config: RunnerConfig, mode: ConfiguredMode = ConfiguredMode.FULL_AND_PIECEWISE, blocks: int = 40) -> tuple[ModelRunner, HandPlan]:
    model = TinyModel()
    plan = HandPlan(model)
    descriptors = plan_descriptors(Ladder.up_to(16), mode, max_num_requests=config.max_num_requests)
    forward = GraphForward(plan, make_backend("cpu", "recorded"), descriptors, config, vocab_size=VOCAB, device="cpu")
    return ModelRunner(model, config, backend=DeviceAttention, forward=forward, num_blocks=blocks), plan


def forward_of(runner: ModelRunner) -> GraphForward:
    assert isinstance(runner.forward, GraphForward)
    return runner.forward


def test_every_term_is_taken_from_the_fraction_of_the_total() -> None:
    plan = MemoryPlan(
        total_bytes=1000, fraction=0.9, weights_bytes=300, buffers_bytes=20, other_bytes=80, activations_bytes=100, graphs_bytes=50
    )
    assert plan.kv_budget_bytes == 900 - 300 - 20 - 80 - 100 - 50
    assert plan.as_json()["kv_budget_bytes"] == plan.kv_budget_bytes


def test_blocks_are_what_the_plan_leaves() -> None:
    plan = MemoryPlan(total_bytes=10_000, fraction=0.5, weights_bytes=1000, buffers_bytes=0, graphs_bytes=500)
    assert num_kv_blocks(config_of(), ONE_GROUP, CPU, plan) == (5000 - 1000 - 500) // 100


def test_a_plan_that_leaves_too_little_is_refused_with_its_terms() -> None:
    plan = MemoryPlan(total_bytes=10 << 20, fraction=0.5, weights_bytes=6 << 20, buffers_bytes=0, graphs_bytes=1 << 20)
    with pytest.raises(KVCacheTooSmallError, match=r"10\.0 MiB - 6\.0 weights - 0\.0 buffers - 0\.0 other - 1\.0 graphs = -2\.0 MiB"):
        num_kv_blocks(config_of(), ONE_GROUP, CPU, plan)


def test_a_profile_predicts_the_graphs_and_leaves_nothing() -> None:
    runner, plan = make(config_of())
    forward = forward_of(runner)
    found = profile_memory(runner, plan)
    assert (forward.manager.num_captured, forward.manager.pool_bytes, forward.manager.memory().total_bytes) == (0, 0, 0)
    forward.capture(runner.dummy_context)
    assert found.graphs_bytes == pytest.approx(forward.manager.memory().total_bytes, rel=0.1)
    assert found.activations_bytes is None
    assert "not measured" in found.note


def test_the_cache_shrinks_by_the_predicted_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "free_bytes", lambda device: 4 << 20)
    with_graphs, without = (profile_memory(*make(config_of(), mode)) for mode in (ConfiguredMode.FULL, ConfiguredMode.NONE))
    assert without.graphs_bytes is None
    assert with_graphs.graphs_bytes
    assert without.kv_budget_bytes - with_graphs.kv_budget_bytes == with_graphs.graphs_bytes


def test_the_model_of_the_profile_serves_the_capture() -> None:
    runner, plan = make(config_of())
    profile_memory(runner, plan)
    forward = forward_of(runner)
    model = forward.manager.memory_model
    forward.capture(runner.dummy_context)
    assert forward.manager.memory_model is model


@pytest.mark.parametrize(
    ("values", "free", "needed"),
    [({}, 10_000, True), ({}, 10_000_000, False), ({"num_blocks": 20}, 10_000, False), ({"kv_cache_bytes": 9}, 10_000, False)],
)
def test_a_profile_is_run_when_memory_decides(values: dict[str, int], free: int, needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "free_bytes", lambda device: free)
    assert needs_profile(config_of(**values), ONE_GROUP, CPU) is needed


def test_another_cache_takes_the_place_of_the_first() -> None:
    runner, _ = make(config_of(), blocks=PROFILE_BLOCKS)
    assert runner.num_blocks == PROFILE_BLOCKS
    runner.allocate_kv_cache(40)
    forward_of(runner).capture(runner.dummy_context)
    assert all(layer.kv_cache is runner.kv_caches[name] for name, layer in runner.layers.items())
    assert next(iter(runner.kv_caches.values())).key.shape[0] == 40
    engine = Engine(InProcessExecutor(runner), Scheduler(runner.config, runner.num_blocks), vocab_size=VOCAB)
    completions = engine.generate(prompts_of(1), SamplingParams(max_tokens=5))
    assert [list(c.token_ids) for c in completions] == [runner.module.greedy(p, 5) for p in prompts_of(1)]


def test_a_built_runner_reports_the_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TinyModel()
    module.config = SimpleNamespace(vocab_size=VOCAB)
    config = config_of(max_num_tokens=64, max_model_len=256, graphs="piecewise", capture_sizes=(1, 2, 4), memory_fraction=0.5)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    groups = kv_groups(attention_layers(module), config, torch.float32)
    per_block = groups[0].block_bytes
    monkeypatch.setattr(build, "compile_model", lambda *_: (HandPlan(module), None))
    monkeypatch.setattr(profile, "free_bytes", lambda device: weights + 200 * per_block)
    runner, start = build_runner(module, config)
    assert start.memory is not None
    assert start.memory.weights_bytes == weights
    assert start.memory.graphs_bytes
    assert runner.num_blocks == start.memory.kv_budget_bytes // per_block < most_kv_blocks(config, groups)
    assert start.capture is not None
    assert start.capture.memory is not None
    assert start.capture.memory.total_bytes == pytest.approx(start.memory.graphs_bytes, rel=0.1)
    assert set(start.seconds) == {"compile", "load kernels", "allocate", "profile", "capture"}


# --- budget ---


@pytest.mark.parametrize("lazy", [False, True])
def test_over_the_graph_budget_sizes_are_trimmed_and_the_others_give_the_same_tokens(lazy: bool) -> None:
    free, _ = make(config_of())
    forward_of(free).capture(free.dummy_context)
    limit = forward_of(free).manager.memory().total_bytes // 3
    runner, _ = make(config_of(graph_memory_bytes=limit))
    forward = forward_of(runner)
    forward.capture(runner.dummy_context, lazy=lazy)
    assert forward.manager.trimmed
    engine = Engine(InProcessExecutor(runner), Scheduler(runner.config, runner.num_blocks), vocab_size=VOCAB)
    completions = engine.generate(prompts_of(1), SamplingParams(max_tokens=9))
    assert [list(c.token_ids) for c in completions] == [runner.module.greedy(p, 9) for p in prompts_of(1)]
    assert 0 < forward.manager.memory().total_bytes <= limit
    assert forward.manager.counters["step.none.capture_failed"] == 0


def test_without_room_for_any_graph_the_reason_is_the_budget() -> None:
    runner, _ = make(config_of(graph_memory_bytes=0))
    forward = forward_of(runner)
    forward.capture(runner.dummy_context)
    decode = forward.dispatcher.dispatch(Shape(num_tokens=2, num_requests=2, uniform_query_len=1, max_query_len=1))
    assert (decode.descriptor.mode, decode.reason) == (GraphMode.NONE, Reason.MEMORY_BUDGET)


def test_the_prediction_is_not_above_the_budget() -> None:
    runner, plan = make(config_of(graph_memory_bytes=5000))
    assert profile_memory(runner, plan).graphs_bytes == 5000


def test_a_negative_graph_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="graph_memory_bytes must be at least 0"):
        config_of(graph_memory_bytes=-1)


def test_the_trace_of_earlier_runs_says_what_graphs_are_for(tmp_path: Path) -> None:
    mode: Mode = "full"
    config = config_of(graph_memory_bytes=5000, graphs=mode, step_trace=tmp_path / "steps.jsonl")
    assert recorded_steps(config) is None
    trace = StepTrace(tmp_path / "steps.jsonl", trace_header(config, DeviceAttention.capture_support))
    shape = Shape(num_tokens=3, num_requests=3, uniform_query_len=1, max_query_len=1)
    for _ in range(5):
        trace.add(shape, GraphMode.FULL, 4, Reason.BEST)
    trace.flush()
    assert recorded_steps(config) == {shape: 5.0}
    assert open_step_trace(config, DeviceAttention.capture_support) is not None
    assert json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])["format"] == "rung.steps"
