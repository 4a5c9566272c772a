from __future__ import annotations

import pytest
import torch

from rung.errors import StepFailedError
from rung.graphs import ConfiguredMode
from rung.runner import FinishReason, NewRequest, SamplingParams, StepHooks, StepPlan
from rung.runner.model_runner import ModelRunner
from tests.runner.test_graph_forward import make
from tests.runner.tiny import TinyModel, make_engine, make_runner


class Recorder(StepHooks):
    """What was called, and the rows that the model had computed by then."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.calls: list[tuple[str, tuple[str, ...], int]] = []

    def before_forward(self, plan: StepPlan) -> None:
        self._add("before_forward", plan)
        assert set(plan.num_scheduled_tokens) <= self.runner.slots.slot_of.keys()

    def no_work(self, plan: StepPlan) -> None:
        self._add("no_work", plan)

    def after_step(self, plan: StepPlan) -> None:
        self._add("after_step", plan)

    def _add(self, name: str, plan: StepPlan) -> None:
        self.calls.append((name, tuple(plan.num_scheduled_tokens), sum(self.runner.module.calls)))  # type: ignore[arg-type]


def test_hooks_are_called_in_order_around_the_forward_pass() -> None:
    runner = make_runner()
    runner.hooks = hooks = Recorder(runner)
    new = NewRequest(request_id="a", token_ids=(1, 2, 3), prompt_len=3, block_ids=((1,),), sampling=SamplingParams())
    runner.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 3}))
    assert hooks.calls == [("before_forward", ("a",), 0)]
    runner.sample_tokens()
    runner.execute_model(StepPlan(finished_request_ids=frozenset({"a"})))
    assert hooks.calls[1:] == [("after_step", ("a",), 3), ("no_work", (), 3)]


def test_a_refused_plan_and_a_dummy_run_call_nothing() -> None:
    runner = make_runner()
    runner.hooks = hooks = Recorder(runner)
    with pytest.raises(Exception, match="unknown"):
        runner.execute_model(StepPlan(num_scheduled_tokens={"nobody": 1}))
    runner.dummy_run(torch.tensor([2, 3], dtype=torch.int32).numpy())
    assert hooks.calls == []


def test_a_plan_of_several_steps_calls_each_hook_once() -> None:
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=4, steps_in_flight=1)
    runner.hooks = hooks = Recorder(runner)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    assert [name for name, _, _ in hooks.calls] == ["before_forward", "after_step"] * 3 + ["no_work"]


def test_what_a_hook_raises_fails_the_step_and_no_other() -> None:
    class Broken(StepHooks):
        def before_forward(self, plan: StepPlan) -> None:
            raise RuntimeError("no connection")

    engine, runner = make_engine(TinyModel())
    runner.hooks = Broken()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    with pytest.raises((StepFailedError, RuntimeError), match="no connection"):
        engine.step()
    assert [update.completion.finish_reason for update in engine.step() if update.completion] == [FinishReason.ERROR]
    runner.hooks = StepHooks()
    assert list(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].token_ids) == runner.module.greedy([1, 2, 3], 3)


@pytest.mark.parametrize("steps_in_flight", [1, 4])
def test_a_hook_that_raises_without_work_ends_nobody(steps_in_flight: int) -> None:
    class Broken(StepHooks):
        def no_work(self, plan: StepPlan) -> None:
            runner.hooks = StepHooks()
            raise RuntimeError("no connection")

    model = TinyModel()
    engine, runner = make_engine(model, steps_in_flight=steps_in_flight)
    engine.add_request([1, 2], SamplingParams(max_tokens=2), request_id="short")
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=50), request_id="cancelled")
    updates = [*engine.step(), *engine.step()]
    engine.abort("cancelled")
    runner.hooks = Broken()
    errors = []
    while engine.has_work:
        try:
            updates += engine.step()
        except RuntimeError as error:
            errors.append(str(error))
    done = {update.request_id: update.completion for update in updates if update.completion}
    assert errors == ["no connection"]
    assert list(done["short"].token_ids) == model.greedy([1, 2], 2)
    assert [done[name].finish_reason for name in ("short", "cancelled")] == [FinishReason.LENGTH, FinishReason.ABORT]
    assert list(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].token_ids) == model.greedy([1, 2, 3], 3)


def test_a_hook_can_fill_the_cache_of_a_request() -> None:
    """A connector in small: another runner computes the beginning of a prompt, the hook copies its blocks, the request starts there."""
    model = TinyModel()
    source = make_runner(TinyModel(), block_size=4)
    tokens = (5, 6, 7, 8, 9, 10, 11, 12, 13)
    new = NewRequest(request_id="a", token_ids=tokens, prompt_len=9, block_ids=((3, 4, 5),), sampling=SamplingParams())
    source.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 9}))
    source.sample_tokens()

    class Load(StepHooks):
        def before_forward(self, plan: StepPlan) -> None:
            for request in plan.new_requests:
                for name, cache in runner.kv_caches.items():
                    cache.key[list(request.block_ids[0][:2])] = source.kv_caches[name].key[[3, 4]]
                    cache.value[list(request.block_ids[0][:2])] = source.kv_caches[name].value[[3, 4]]

    runner = make_runner(model, block_size=4)
    runner.hooks = Load()
    moved = NewRequest(
        request_id="b",
        token_ids=tokens,
        prompt_len=9,
        block_ids=((1, 2, 7),),
        sampling=SamplingParams(temperature=0),
        num_computed_tokens=8,
    )
    runner.execute_model(StepPlan(new_requests=(moved,), num_scheduled_tokens={"b": 1}))
    output = runner.sample_tokens()
    assert output is not None
    assert [list(t) for t in output.get_output().sampled_token_ids] == [model.greedy(list(tokens), 1)]
    assert sum(model.calls) == 1
