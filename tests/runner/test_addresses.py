"""Tensors that the runner's graphs read are replaced: named, captured again, or run without graphs; never an old output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.config import AddressPolicy
from rung.counters import Count
from rung.errors import AddressChangedError, StepFailedError
from rung.graphs import ConfiguredMode
from rung.runner import Engine, ModelRunner, NewRequest, SamplingParams, StepPlan
from rung.runner.graph_forward import GraphForward
from tests.runner.test_graph_forward import make, prompts_of


def watched(policy: AddressPolicy) -> tuple[Engine, ModelRunner, GraphForward]:
    return make(ConfiguredMode.FULL_AND_PIECEWISE, policy=policy)


def replace_weight(runner: ModelRunner) -> None:
    layer = runner.module.layers[1]  # type: ignore[index]
    layer.out.weight = torch.nn.Parameter(layer.out.weight.detach() * -1.5)  # type: ignore[union-attr]


def replace_cache(runner: ModelRunner) -> None:
    """New memory with the old contents."""
    name, cache = next(iter(runner.kv_caches.items()))
    runner.layers[name].kv_cache.key.data = cache.key.clone()  # type: ignore[union-attr]


@pytest.mark.parametrize(("replace", "name"), [(replace_weight, "layers.1.out.weight"), (replace_cache, "kv_cache.key")])
def test_a_step_on_old_addresses_raises_and_names_the_tensor(replace: Any, name: str) -> None:
    """T34."""
    engine, runner, _ = watched("raise")
    engine.generate(prompts_of(1)[:2], SamplingParams(max_tokens=3))
    replace(runner)
    with pytest.raises(AddressChangedError, match=name):
        runner.weights_changed()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(AddressChangedError, match=name):
        engine.step()


@pytest.mark.parametrize("told", [False, True])
def test_a_step_on_an_old_cache_runs_again_in_the_middle_of_a_request(told: bool) -> None:
    """T34: the stale step has written its rows into the cache that is gone."""
    engine, runner, forward = watched("recapture")
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=8))
    tokens = [t for _ in range(3) for u in engine.step() for t in u.token_ids]
    captured = forward.manager.counters[Count.CAPTURES]
    replace_cache(runner)
    if told:
        runner.weights_changed()
        assert forward.manager.counters[Count.CAPTURES] == 2 * captured
    while engine.has_work:
        tokens += [t for u in engine.step() for t in u.token_ids]
    assert tokens == runner.module.greedy([1, 2, 3], 8)
    assert forward.manager.counters[Count.ADDRESS_CHANGES] == 1


def test_replaced_weights_run_through_new_graphs() -> None:
    """T34."""
    engine, runner, forward = watched("recapture")
    engine.generate([[4, 5]], SamplingParams(max_tokens=3))
    replace_weight(runner)
    (completion,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
    assert list(completion.token_ids) == runner.module.greedy([1, 2, 3], 8)
    counts = forward.manager.counters
    assert (counts[Count.ADDRESS_CHANGES], counts["step.none.address_changed"]) == (1, 0)


@pytest.mark.parametrize("replace", [replace_weight, replace_cache])
def test_steps_after_a_change_run_without_graphs_by_policy(replace: Any) -> None:
    """T34."""
    engine, runner, forward = watched("none")
    engine.generate([[4, 5]], SamplingParams(max_tokens=3))
    replace(runner)
    (completion,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert list(completion.token_ids) == runner.module.greedy([1, 2, 3], 4)
    counts = forward.manager.counters
    assert counts["step.none.address_changed"] == 4


def test_a_decode_graph_that_advanced_on_old_addresses_raises_whatever_the_policy() -> None:
    """T34: run again, it would advance the requests twice."""
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, policy="recapture", decode_in_graph=True)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=20))
    for _ in range(4):
        engine.step()
    replace_weight(runner)
    with pytest.raises(AddressChangedError, match=r"layers\.1\.out\.weight.*\nhint: the step has advanced"):
        engine.step()


@pytest.mark.parametrize("policy", ["recapture", "none"])
def test_a_change_that_was_told_is_followed_before_the_next_decode_graph(policy: AddressPolicy) -> None:
    """T34."""
    engine, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE, policy=policy, decode_in_graph=True)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=8))
    tokens = [t for _ in range(4) for u in engine.step() for t in u.token_ids]
    replace_cache(runner)
    runner.weights_changed()
    while engine.has_work:
        tokens += [t for u in engine.step() for t in u.token_ids]
    assert tokens == runner.module.greedy([1, 2, 3], 8)
    assert (forward.manager.counters["step.none.address_changed"] > 0) is (policy == "none")


def test_a_decode_step_behind_a_refused_one_runs_without_its_graph() -> None:
    """The change was seen behind the step that raised; the graph of the next step would be replaced by a plan that does not sample."""
    _, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE, policy="none", decode_in_graph=True)
    prompts = {"a": (1, 2, 3), "b": (5, 6)}
    blocks = {"a": (1, 2), "b": (3, 4)}
    new = tuple(
        NewRequest(request_id=name, token_ids=prompt, prompt_len=len(prompt), block_ids=(blocks[name],), sampling=SamplingParams())
        for name, prompt in prompts.items()
    )
    runner.execute_model(StepPlan(new_requests=new, num_scheduled_tokens={name: len(prompt) for name, prompt in prompts.items()}))
    runner.sample_tokens()
    replace_cache(runner)
    with pytest.raises(StepFailedError, match="kv_cache"):
        runner.execute_model(StepPlan(num_scheduled_tokens={"a": 1}))
    runner.execute_model(StepPlan(num_scheduled_tokens={"b": 1}))
    output = runner.sample_tokens()
    assert output is not None
    assert output.get_output().sampled_token_ids == ((runner.module.greedy([5, 6], 2)[1],),)
    assert forward.manager.counters["step.none.address_changed"] == 1
