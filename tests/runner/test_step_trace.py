"""The steps of a runner in its trace."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rung.attention import CaptureSupport
from rung.errors import ConfigError
from rung.graphs import ConfiguredMode, StepTrace, TraceHeader, read_trace
from rung.runner import Engine, InProcessExecutor, ModelRunner, RunnerConfig, SamplingParams, Scheduler
from rung.runner.step_trace import open_step_trace, trace_header
from tests.runner.test_graph_forward import make
from tests.runner.tiny import VOCAB, PlainAttention, TinyModel


def test_trace_agrees_with_the_counters(tmp_path: Path) -> None:
    engine, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE, top=8)
    runner._step.trace = trace = StepTrace(tmp_path / "steps.jsonl", TraceHeader())
    engine.generate([list(range(16)), [1, 2, 3], [4]], SamplingParams(max_tokens=5))
    trace.flush()
    counted: Counter[str] = Counter()
    (run,) = read_trace(tmp_path / "steps.jsonl")
    for step in run.steps:
        counted[f"step.{step.mode}.{step.reason}"] += step.count
    assert counted == {name: count for name, count in forward.manager.counters.items() if name.startswith("step.")}
    first = run.steps[0]
    assert (first.shape.num_tokens, first.shape.uniform_query_len, first.mode, first.padded) == (16, None, "none", 16)
    assert all(step.padded == step.shape.num_requests for step in run.steps if step.mode == "full" and step.shape.num_tokens in (1, 2))


def test_steps_without_graphs_say_that_graphs_are_off(tmp_path: Path) -> None:
    config = RunnerConfig(max_num_requests=4, max_num_tokens=32, max_model_len=64, num_blocks=20, step_trace=tmp_path / "steps.jsonl")
    trace = open_step_trace(config, CaptureSupport.NEVER)
    assert trace is not None
    runner = ModelRunner(TinyModel(), config, backend=PlainAttention, trace=trace)
    runner.dummy_run(np.array([3], np.int32))  # belongs to no request
    engine = Engine(InProcessExecutor(runner), Scheduler(config, runner.num_blocks), vocab_size=VOCAB)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    trace.flush()
    (run,) = read_trace(tmp_path / "steps.jsonl")
    assert [(step.shape.num_tokens, step.mode, step.reason, step.count) for step in run.steps] == [
        (3, "none", "graphs_off", 1),
        (1, "none", "graphs_off", 2),
    ]
    assert (run.header.graphs, run.header.ladder, run.header.max_num_requests) == (ConfiguredMode.NONE, (), 4)


def test_header_holds_the_ladder_and_the_limits() -> None:
    config = RunnerConfig(graphs="full_and_piecewise", max_num_requests=4, max_num_tokens=32)
    header = trace_header(config, CaptureSupport.UNIFORM_BATCH)
    assert header.ladder == (1, 2, 4, 8)
    assert (header.capture_support, header.max_num_tokens, header.max_waste) == (CaptureSupport.UNIFORM_BATCH, 32, 2.0)


def test_no_trace_is_opened_unless_asked_for() -> None:
    assert open_step_trace(RunnerConfig(), CaptureSupport.NEVER) is None


def test_waste_cap_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_waste"):
        RunnerConfig(max_waste=0.9)
