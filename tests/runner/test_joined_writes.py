"""Piecewise graphs of a compiled decoder: writing keys and values is part of the graph before it, attention runs between."""

from __future__ import annotations

import torch

from rung.compile.compiled import CompiledFunction
from rung.compile.joined import joined_pairs, private_values
from rung.graphs import Descriptor, GraphMode
from rung.graphs.program import GraphLaunch, PreboundBreak
from rung.models import random_model
from rung.runner import RunnerConfig, SamplingParams, build_engine
from rung.runner.config import Mode
from rung.runner.graph_forward import GraphForward

PROMPTS = [[1, 2, 3], list(range(20, 31))]


def tokens(graphs: Mode) -> tuple[list[list[int]], GraphForward]:
    config = RunnerConfig(
        max_num_requests=4, max_num_tokens=16, max_model_len=64, num_blocks=40, graphs=graphs, capture_sizes=(1, 2, 4, 8, 16)
    )
    engine, runner, _ = build_engine(random_model("tiny", seed=3), config)
    forward = runner.forward
    assert isinstance(forward, GraphForward)
    completions = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    return [list(completion.token_ids) for completion in completions], forward


def test_piecewise_steps_write_the_cache_inside_the_graph_before_attention() -> None:
    with torch.no_grad():
        wanted, _ = tokens("none")
        found, forward = tokens("piecewise")
        whole, full = tokens("full")
    assert found == whole == wanted
    program = forward.manager.program(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4))
    kinds = [type(action) for action in program.actions]
    assert kinds == [GraphLaunch, PreboundBreak] * 3 + [GraphLaunch]  # three layers
    assert all(action.name.endswith(".1") for action in program.actions if isinstance(action, PreboundBreak))
    assert {full.manager.program(descriptor).launches for descriptor in full.manager.captured} == {1}
    assert {name for name in full.manager.counters if name.startswith("step.")} == {"step.full.best"}


def test_each_layer_may_rotate_and_attend_in_one_kernel() -> None:
    with torch.no_grad():
        _, forward = tokens("full")
    compiled = forward._plan
    assert isinstance(compiled, CompiledFunction)
    breaks = [step for step in compiled.plan.steps if step.piece is None]
    assert [joined_pairs(step, private_values(compiled.plan)) for step in breaks] == [{0}] * 3
