"""Piecewise graphs of a compiled decoder: attention runs between them, and writing keys and values is part of the graph in front, or of the
break where decodes are piecewise and a kernel does both."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rung.attention import AttentionBackend
from rung.attention.backends.torch_reference import TorchReference
from rung.compile.compiled import CompiledFunction, JoinedPlan
from rung.compile.joined import joined_pairs, private_values
from rung.graphs import Descriptor, GraphMode
from rung.graphs.program import GraphLaunch, PreboundBreak
from rung.models import random_model
from rung.runner import RunnerConfig, SamplingParams, build, build_engine
from rung.runner.config import Mode
from rung.runner.graph_forward import GraphForward
from tests.runner.joining import Apart, Joining, launched

PROMPTS = [[1, 2, 3], list(range(20, 31))]
LAYERS = 3


def config(graphs: Mode) -> RunnerConfig:
    return RunnerConfig(
        max_num_requests=4, max_num_tokens=16, max_model_len=64, num_blocks=40, graphs=graphs, capture_sizes=(1, 2, 4, 8, 16)
    )


def tokens(graphs: Mode) -> tuple[list[list[int]], GraphForward]:
    engine, runner, _ = build_engine(random_model("tiny", seed=3), config(graphs))
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
    assert kinds == [GraphLaunch, PreboundBreak] * LAYERS + [GraphLaunch]
    assert all(action.name.endswith(".1") for action in program.actions if isinstance(action, PreboundBreak))
    assert {full.manager.program(descriptor).num_graphs for descriptor in full.manager.captured} == {1}
    assert {name for name in full.manager.counters if name.startswith("step.")} == {"step.full.best"}


def test_each_layer_may_rotate_and_attend_in_one_kernel() -> None:
    with torch.no_grad():
        _, forward = tokens("full")
    compiled = forward._plan
    assert isinstance(compiled, CompiledFunction)
    breaks = [step for step in compiled.plan.steps if step.piece is None]
    assert [joined_pairs(step, private_values(compiled.plan)) for step in breaks] == [{0}] * LAYERS


@pytest.mark.parametrize(
    ("backend", "graphs", "joined"),
    [
        (Joining, "piecewise", True),
        (Joining, "full_and_piecewise", False),  # decodes have full graphs
        (Joining, "none", False),
        (Apart, "piecewise", False),
        (TorchReference, "piecewise", False),
    ],
)
def test_piecewise_decodes_leave_the_rotation_to_a_kernel_that_does_both(
    backend: type[AttentionBackend], graphs: Mode, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "select_backend", lambda *arguments, **options: (backend, "a test"))
    with torch.no_grad():
        _, forward = tokens(graphs)
    assert isinstance(forward.manager.plan, JoinedPlan if joined else CompiledFunction)
    if graphs != "none":
        program = forward.manager.program(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4))
        names = [action.name for action in program.actions if isinstance(action, PreboundBreak)]
        assert [name.endswith(".1") for name in names] == [not joined] * LAYERS
        assert all(action.attention is not None for action in program.actions if isinstance(action, PreboundBreak))


def test_a_replay_of_decodes_is_one_kernel_a_layer_and_a_mixed_one_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes and a mixed batch replay one program, padded, in Python and as the launches of an earlier step."""
    with torch.no_grad():
        wanted, _ = tokens("none")
        monkeypatch.setattr(build, "select_backend", lambda *arguments, **options: (Joining, "a test"))
        engine, runner, _ = build_engine(random_model("tiny", seed=3), config("piecewise"))
        assert isinstance(runner.forward, GraphForward)
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        steps: list[tuple[list[int], Counter[str]]] = []
        found: dict[str, list[int]] = {}

        def step() -> None:
            launched.clear()
            runner.forward.manager.poison()
            for update in engine.step():
                found.setdefault(update.request_id, []).extend(update.token_ids)
            steps.append(launched.copy())

        first = engine.add_request(PROMPTS[0], params)
        step(), step()
        second = engine.add_request(PROMPTS[1], params)
        while engine.has_work:
            step()
    assert [found[first], found[second]] == wanted
    apart, together = Counter({"rotate": LAYERS, "attend": LAYERS}), Counter({"rotate and attend": LAYERS})
    assert all(ran in (apart, together, Counter()) for ran in steps)
    assert steps[0] == apart
    assert steps[1] == together
    assert steps.count(apart) == 2
    assert steps.count(together) >= 6
    assert runner.counters["repeated_breaks"] >= 4 * LAYERS
    assert not any(name.startswith("python_break") for name in runner.counters)
