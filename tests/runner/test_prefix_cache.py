"""Requests start behind what earlier ones have computed, and behind nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from rung.counters import Count
from rung.graphs import ConfiguredMode
from rung.runner import FinishReason, ModelRunnerOutput, NewRequest, Request, RunnerConfig, SamplingParams, Scheduler, StepPlan
from rung.runner.draft import Draft
from tests.runner.test_graph_forward import VOCAB, make
from tests.runner.test_scheduler import answer
from tests.runner.tiny import TinyModel, make_engine

BLOCK = 4


def scheduler_of(num_blocks: int = 33, **config: Any) -> Scheduler:
    values = {"max_num_requests": 4, "max_num_tokens": 32, "max_model_len": 64, "block_size": BLOCK, **config}
    return Scheduler(RunnerConfig(**values), num_blocks)


def request(name: str, prompt: Sequence[int], output: int = 8) -> Request:
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(), max_total_tokens=len(prompt) + output)


def enters(scheduler: Scheduler, prompt: Sequence[int], name: str = "b") -> NewRequest:
    """Add a request and schedule its entry."""
    scheduler.add(request(name, prompt))
    (new,) = scheduler.schedule().new_requests
    return new


def serve(scheduler: Scheduler, prompt: Sequence[int], name: str = "a", output: int = 8) -> Request:
    """Run a request to its end."""
    done = request(name, prompt, output)
    scheduler.add(done)
    while scheduler.has_unfinished:
        answer(scheduler.schedule(), scheduler)
    scheduler.schedule()
    return done


def test_a_request_starts_behind_the_blocks_of_an_earlier_one() -> None:
    scheduler = scheduler_of()
    serve(scheduler, [*range(10), 50], output=1)
    new = enters(scheduler, [*range(10), 60, 61])
    assert new.num_computed_tokens == 8
    assert new.block_ids[0][:2] == (1, 2)
    assert (scheduler.counters[Count.PREFIX_TOKENS], scheduler.counters[Count.PREFIX_HIT_TOKENS]) == (11 + 12, 8)


def test_output_tokens_are_found_too() -> None:
    scheduler = scheduler_of()
    first = serve(scheduler, range(3))
    assert enters(scheduler, [*range(3), *first.output_token_ids, 5]).num_computed_tokens == 8


def test_at_least_one_token_is_computed() -> None:
    scheduler = scheduler_of()
    serve(scheduler, range(8))
    assert enters(scheduler, range(8)).num_computed_tokens == 4


def test_the_same_tokens_behind_others_are_not_the_same_block() -> None:
    scheduler = scheduler_of()
    serve(scheduler, range(8), output=1)
    assert enters(scheduler, [9, 9, 9, 9, 4, 5, 6, 7, 8]).num_computed_tokens == 0


def test_a_block_of_a_step_in_flight_is_not_found() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", range(9)))
    step = scheduler.schedule()
    assert enters(scheduler, range(9), "b").num_computed_tokens == 0
    answer(step, scheduler)
    assert enters(scheduler, range(9), "c").num_computed_tokens == 8


def test_what_a_failed_step_should_have_computed_is_not_found() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", range(9)))
    scheduler.schedule()
    scheduler.fail(newest=True)
    assert enters(scheduler, range(9)).num_computed_tokens == 0


def test_a_block_is_shared_by_running_requests() -> None:
    scheduler = scheduler_of(num_blocks=17)
    scheduler.add(request("a", range(17)))
    answer(scheduler.schedule(), scheduler)
    assert enters(scheduler, range(17)).block_ids[0][:4] == (1, 2, 3, 4)
    assert scheduler.blocks.num_free == 16 - 5 - 1
    scheduler.finish("a", FinishReason.ABORT)
    assert scheduler.blocks.num_free == 16 - 5
    scheduler.finish("b", FinishReason.ABORT)
    assert scheduler.blocks.num_free == 16


def test_found_blocks_are_not_free_for_the_rest_of_the_same_request() -> None:
    scheduler = scheduler_of(num_blocks=17)
    serve(scheduler, range(33), output=1)  # keeps 8 blocks
    scheduler.add(request("hold", range(100, 127), output=1))  # 7 blocks
    scheduler.schedule()
    scheduler.add(request("b", [*range(32), *range(200, 205)], output=27))
    assert scheduler.schedule().new_requests == ()  # 9 are free: 8 of them found, and 2 more needed
    assert scheduler.blocks.num_free == 9
    scheduler.finish("b", FinishReason.ABORT)
    assert enters(scheduler, [*range(32), *range(200, 204)], "c").num_computed_tokens == 32
    assert scheduler.blocks.num_free == 0


def test_a_preempted_request_comes_back_behind_what_it_had_computed() -> None:
    scheduler = scheduler_of(num_blocks=17)
    scheduler.add(request("a", range(30), output=20))
    scheduler.add(request("b", range(100, 130), output=20))
    starts = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        starts += [new.num_computed_tokens for new in plan.new_requests if new.request_id == "b"]
        answer(plan, scheduler)
    assert starts[0] == 0
    assert any(starts[1:])
    assert scheduler.blocks.num_free == 16


def test_a_late_step_of_a_preempted_request_vouches_for_no_block_of_its_next_life() -> None:
    """The step computed its old blocks; the new ones are not computed yet."""
    scheduler = scheduler_of(num_blocks=17, long_prefill_chunk=8)
    scheduler.add(request("a", range(20)))
    first = scheduler.schedule()
    scheduler._preempt(scheduler.running.pop(), Draft(0))
    again = scheduler.schedule()
    assert again.num_scheduled_tokens == {"a": 8}
    scheduler.update(ModelRunnerOutput(request_ids=tuple(first.num_scheduled_tokens), sampled_token_ids=((),)))
    assert enters(scheduler, range(9)).num_computed_tokens == 0


def test_a_replay_past_the_end_keeps_only_what_it_computed() -> None:
    """Tokens behind a stop token were never computed, whatever the plan counted."""
    scheduler = scheduler_of(replay_steps=8)
    scheduler.add(
        Request(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(), max_total_tokens=40, stop_token_ids=frozenset({9}))
    )
    answer(scheduler.schedule(), scheduler)
    assert scheduler.schedule().num_steps == 8
    scheduler.update(ModelRunnerOutput(request_ids=("a",), sampled_token_ids=((5, 9, 0, 0, 0, 0, 0, 0),)))
    assert scheduler.blocks.pools[0].num_kept == 1
    assert scheduler.requests == {}
    assert enters(scheduler, [1, 2, 7, 5, 9, 0, 0, 0, 0]).num_computed_tokens == 4


def test_replaced_weights_empty_the_cache() -> None:
    scheduler = scheduler_of()
    serve(scheduler, range(9))
    scheduler.forget_prefixes()
    assert enters(scheduler, range(9)).num_computed_tokens == 0


def test_log_probabilities_of_a_prompt_need_all_of_it_computed() -> None:
    scheduler = scheduler_of()
    serve(scheduler, range(9))
    asks = request("b", range(9))
    asks.sampling = SamplingParams(prompt_logprobs=1)
    scheduler.add(asks)
    assert [new.num_computed_tokens for new in scheduler.schedule().new_requests] == [0]


def test_a_row_that_could_not_be_sampled_leaves_no_block_behind() -> None:
    """Its keys and values may be the reason."""
    scheduler = scheduler_of()
    scheduler.add(request("a", range(9)))
    scheduler.schedule()
    scheduler.update(ModelRunnerOutput(request_ids=("a",), sampled_token_ids=((),), errors={"a": "NaN"}))
    assert enters(scheduler, range(9)).num_computed_tokens == 0


def test_switched_off_nothing_is_found_or_counted() -> None:
    scheduler = scheduler_of(prefix_cache=False)
    serve(scheduler, range(9))
    assert enters(scheduler, range(9)).num_computed_tokens == 0
    assert scheduler.counters.snapshot() == {}


def shared_prompts(seed: int, count: int = 24) -> list[list[int]]:
    """Prompts that share beginnings with one another."""
    chance = random.Random(seed)
    trunks = [[chance.randrange(VOCAB) for _ in range(18)] for _ in range(3)]
    return [[*chance.choice(trunks)[: chance.randint(1, 18)], *(chance.randrange(VOCAB) for _ in range(chance.randint(1, 4)))]
            for _ in range(count)]  # fmt: skip


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [13, 60])
def test_tokens_are_those_of_the_model_without_cache(steps_in_flight: int, num_blocks: int) -> None:
    model = TinyModel()
    engine, runner = make_engine(
        model, num_blocks=num_blocks, block_size=BLOCK, max_model_len=40, long_prefill_chunk=7, steps_in_flight=steps_in_flight
    )
    preemptions = watch_preemptions(engine.scheduler)
    prompts = shared_prompts(steps_in_flight)
    completions = engine.generate(prompts, SamplingParams(max_tokens=10))
    assert [list(c.token_ids) for c in completions] == [model.greedy(p, 10) for p in prompts]
    assert engine.scheduler.counters[Count.PREFIX_HIT_TOKENS] > 40
    assert bool(preemptions) == (num_blocks == 13)
    assert engine.scheduler.blocks.num_free == runner.num_blocks - 1


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_decode_graphs_start_behind_prefixes(replay_steps: int) -> None:
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=replay_steps, num_blocks=30)
    prompts = shared_prompts(5)
    stop = frozenset({3, 40, 70})
    first = engine.generate(prompts, SamplingParams(max_tokens=10, stop_token_ids=stop))
    again = engine.generate(prompts, SamplingParams(max_tokens=10, stop_token_ids=stop))
    wanted = []
    for prompt in prompts:
        tokens = runner.module.greedy(prompt, 10)
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        wanted.append(tokens[:end])
    assert [list(c.token_ids) for c in first] == wanted
    assert [list(c.token_ids) for c in again] == wanted
    assert engine.scheduler.counters[Count.PREFIX_HIT_TOKENS] > 40


def watch_preemptions(scheduler: Scheduler) -> list[str]:
    preempted: list[str] = []
    schedule = scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        preempted.extend(plan.preempted_request_ids)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    return preempted


def test_log_probabilities_of_a_prompt_need_every_row_of_it() -> None:
    engine, _ = make_engine(TinyModel(), max_num_tokens=32, block_size=BLOCK)
    prompt = list(range(13))
    first = engine.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=1))[0].prompt_logprobs
    assert first is not None
    assert engine.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=1))[0].prompt_logprobs == first
    assert len(first) == len(prompt)
