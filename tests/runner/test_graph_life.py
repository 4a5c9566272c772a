"""The life of a runner's graphs between steps: captured by traffic, suspended, resumed, captured again."""

from __future__ import annotations

import pytest

from rung.counters import Count
from rung.errors import ConfigError, StateError
from rung.graphs import ConfiguredMode
from rung.runner import NewRequest, RunnerConfig, SamplingParams, StepPlan
from tests.runner.test_graph_forward import make, prompts_of

GREEDY = SamplingParams(max_tokens=9)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("mode", [ConfiguredMode.PIECEWISE, ConfiguredMode.FULL_AND_PIECEWISE])
def test_graphs_appear_behind_steps_that_asked_for_them(mode: ConfiguredMode, in_graph: bool) -> None:
    engine, runner, forward = make(mode, capture_after=2, decode_in_graph=in_graph)
    assert forward.manager.captured == ()
    completions = engine.generate(prompts_of(1), GREEDY)
    assert [list(c.token_ids) for c in completions] == [runner.module.greedy(p, 9) for p in prompts_of(1)]
    counts = forward.manager.counters
    assert 0 < counts[Count.CAPTURES] < len(forward.descriptors)
    assert counts["step.none.capture_pending"] > 0
    assert counts[Count.REPLAYS] > 0


def test_nothing_is_captured_behind_steps_without_a_budget() -> None:
    engine, _, forward = make(ConfiguredMode.PIECEWISE, capture_after=1, capture_seconds=0)
    engine.generate([[1, 2, 3]], GREEDY)
    assert forward.manager.counters[Count.CAPTURES] == 0
    assert engine.capture_due() == 2  # the prompt's size and the decodes'
    engine.generate([[1, 2, 3]], GREEDY)
    assert forward.manager.counters["step.piecewise.best"] > 0


@pytest.mark.parametrize("in_graph", [False, True])
def test_suspended_in_the_middle_of_a_request(in_graph: bool) -> None:
    engine, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=in_graph)
    captured = forward.manager.captured
    engine.add_request([1, 2, 3], GREEDY)
    updates = engine.step()
    engine.suspend_graphs()
    assert forward.manager.pool_bytes == 0
    updates += engine.step()
    engine.resume_graphs()
    assert forward.manager.captured == captured
    while engine.has_work:
        updates += engine.step()
    assert [t for u in updates for t in u.token_ids] == runner.module.greedy([1, 2, 3], 9)
    assert forward.manager.counters["step.none.suspended"] > 0


def test_captured_again_between_steps() -> None:
    engine, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE)
    captures = forward.manager.counters[Count.CAPTURES]
    runner.recapture_graphs()
    assert forward.manager.counters[Count.CAPTURES] == 2 * captures
    (completion,) = engine.generate([[1, 2, 3]], GREEDY)
    assert list(completion.token_ids) == runner.module.greedy([1, 2, 3], 9)


@pytest.mark.parametrize("call", ["capture_due", "suspend_graphs", "resume_graphs", "recapture_graphs"])
def test_a_parked_step_is_sampled_first(call: str) -> None:
    _, runner, _ = make(ConfiguredMode.PIECEWISE)
    new = NewRequest(request_id="a", token_ids=(5, 6, 7), prompt_len=3, block_ids=((1,),), sampling=SamplingParams())
    runner.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 3}))
    with pytest.raises(StateError, match=call):
        getattr(runner, call)()


def test_contradicting_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        RunnerConfig(lazy_capture=True, capture_after=2)
    with pytest.raises(ConfigError, match="capture_after"):
        RunnerConfig(capture_after=0)
