"""Decode graphs that build their inputs, sample and advance the requests themselves."""

from __future__ import annotations

import random

import pytest

from rung.counters import Count
from rung.errors import BlockTableError, RequestError, StateError
from rung.graphs import ConfiguredMode
from rung.runner import CachedRequest, Completion, NewRequest, SamplingParams, StepPlan
from rung.runner.grammar import GrammarMask
from rung.runner.output import RecordedTokens
from tests.runner.sampling import pack
from tests.runner.test_graph_forward import VOCAB, make, prompts_of

GREEDY = SamplingParams(max_tokens=9)


def run(prompts: list[list[int]], params: SamplingParams | list[SamplingParams], **config: int | bool) -> list[Completion]:
    engine, _, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, **config)
    return engine.generate(prompts, params)


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("replay_steps", [1, 4])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_tokens_are_those_of_the_model_without_cache(replay_steps: int, steps_in_flight: int) -> None:
    engine, runner, _ = make(
        ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=replay_steps, steps_in_flight=steps_in_flight
    )
    completions = engine.generate(prompts_of(1), GREEDY)
    assert [list(c.token_ids) for c in completions] == [runner.module.greedy(p, 9) for p in prompts_of(1)]


def test_a_steady_step_is_one_launch_and_copies_nothing_to_the_device() -> None:
    engine, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, block_size=32, num_blocks=20)
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add_request(prompt, SamplingParams(max_tokens=20))
    for _ in range(4):
        engine.step()
    before = runner.counters[Count.HOST_TO_DEVICE_COPIES]
    replays = forward.manager.counters[Count.REPLAYS]
    for _ in range(5):
        assert len(engine.step()) == 2
    assert runner.counters[Count.HOST_TO_DEVICE_COPIES] == before
    assert forward.manager.counters[Count.REPLAYS] == replays + 5


def test_several_steps_are_replayed_when_nobody_waits() -> None:
    engine, _, forward = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=4, steps_in_flight=1)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()  # the prompt, and the first token
    before = forward.manager.counters[Count.REPLAYS]
    assert [len(engine.step()[0].token_ids) for _ in range(2)] == [4, 4]
    assert forward.manager.counters[Count.REPLAYS] == before + 8
    assert not engine.has_work or engine.step() == []


@pytest.mark.parametrize("replay_steps", [1, 4, 16])
def test_a_stop_token_ends_a_request_in_the_middle_of_a_replay(replay_steps: int) -> None:
    prompts = prompts_of(2)
    plain = tokens_of(run(prompts, SamplingParams(max_tokens=20)))
    params = [SamplingParams(max_tokens=20, stop_token_ids=frozenset({tokens[n]})) for n, tokens in enumerate(plain)]
    got = run(prompts, params, decode_in_graph=True, replay_steps=replay_steps)
    for tokens, whole, param in zip(tokens_of(got), plain, params, strict=True):
        (stop,) = param.stop_token_ids
        assert tokens == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize(("replay_steps", "steps_in_flight"), [(1, 2), (4, 1), (4, 3), (16, 2)])
def test_an_arrival_waits_for_the_plans_in_flight_and_no_longer(replay_steps: int, steps_in_flight: int) -> None:
    engine, _, _ = make(
        ConfiguredMode.FULL_AND_PIECEWISE,
        decode_in_graph=True,
        replay_steps=replay_steps,
        steps_in_flight=steps_in_flight,
        max_model_len=128,
        num_blocks=80,
    )
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=100), request_id="old")
    for _ in range(3):
        engine.step()
    engine.add_request([4, 5], SamplingParams(max_tokens=2), request_id="new")
    waited = 0
    while True:
        updates = engine.step()
        waited += sum(len(update.token_ids) for update in updates if update.request_id == "old")
        if any(update.request_id == "new" for update in updates):
            break
    # What was enqueued before, and the step that they share.
    assert waited <= (steps_in_flight - 1) * replay_steps + 1


def test_steps_are_replayed_while_the_longest_plan_fits_every_request() -> None:
    engine, _, _ = make(
        ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=16, steps_in_flight=1, max_model_len=128, num_blocks=80
    )
    sizes = []
    schedule = engine.scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        if plan.num_scheduled_tokens:
            sizes.append((plan.num_steps, len(plan.num_scheduled_tokens)))
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    completions = engine.generate([[1, 2, 3], [4, 5]], [SamplingParams(max_tokens=41), SamplingParams(max_tokens=21)])
    assert [len(c.token_ids) for c in completions] == [41, 21]
    assert sizes == [(1, 2), (16, 2), (4, 2), (16, 1), (4, 1)]


def test_random_rows_beside_greedy_ones_draw_what_the_sampler_draws() -> None:
    prompts = prompts_of(3)
    params = [SamplingParams(max_tokens=12, temperature=0.7 * (n % 2), seed=n) for n in range(len(prompts))]
    assert tokens_of(run(prompts, params, decode_in_graph=True)) == tokens_of(run(prompts, params, decode_in_graph=False))


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_a_row_that_the_graph_cannot_sample_leaves_sampling_to_the_sampler(replay_steps: int) -> None:
    prompts = prompts_of(4)
    params = [SamplingParams(max_tokens=12 + n, temperature=0.8, top_k=5 * (n % 2), seed=n) for n in range(len(prompts))]
    got = run(prompts, params, decode_in_graph=True, replay_steps=replay_steps)
    assert tokens_of(got) == tokens_of(run(prompts, params, decode_in_graph=False))


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_preemption_under_a_small_cache_changes_no_token(replay_steps: int) -> None:
    chance = random.Random(7)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 12))] for _ in range(8)]
    wanted = tokens_of(run(prompts, SamplingParams(max_tokens=16)))
    engine, _, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=replay_steps, num_blocks=13, max_model_len=48)
    preempted: list[str] = []
    schedule = engine.scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        preempted.extend(plan.preempted_request_ids)
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=16))) == wanted
    assert preempted


def test_a_mask_needs_a_plan_that_announces_it() -> None:
    _, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True)
    new = NewRequest(request_id="a", token_ids=(1, 2), prompt_len=2, block_ids=((1, 2),), sampling=SamplingParams())
    runner.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 2}))
    runner.sample_tokens()
    only_5 = GrammarMask({"a": 0}, pack([5], VOCAB)[None])
    decode = StepPlan(cached_requests=(CachedRequest(request_id="a", num_computed_tokens=2),), num_scheduled_tokens={"a": 1})
    runner.execute_model(decode)
    with pytest.raises(StateError, match="has_bitmask"):
        runner.sample_tokens(only_5)
    first = runner.sample_tokens()
    assert first is not None
    masked = StepPlan(
        cached_requests=(CachedRequest(request_id="a", num_computed_tokens=3),), num_scheduled_tokens={"a": 1}, has_bitmask=True
    )
    runner.execute_model(masked)
    output = runner.sample_tokens(only_5)
    assert output is not None
    assert output.get_output().sampled_token_ids == ((5,),)


def test_a_plan_of_several_steps_is_for_decodes_and_within_the_configuration() -> None:
    _, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, replay_steps=2)
    new = NewRequest(request_id="a", token_ids=(1, 2, 3), prompt_len=3, block_ids=((1,),), sampling=SamplingParams())
    with pytest.raises(RequestError, match="not decoding"):
        runner.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 2}, num_steps=2))
    with pytest.raises(RequestError, match="replay_steps"):
        runner.execute_model(StepPlan(num_steps=3))
    runner.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 3}))
    runner.sample_tokens()
    more = StepPlan(cached_requests=(CachedRequest(request_id="a", num_computed_tokens=3),), num_scheduled_tokens={"a": 1}, num_steps=2)
    with pytest.raises(BlockTableError, match="1 blocks"):
        runner.execute_model(more)  # one block of 4 tokens


def test_a_slot_that_is_used_again_is_uploaded_again() -> None:
    """The device took the slot of a stopped request out of the batch; the next request in the same slot and row must run."""
    engine, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=True, max_num_requests=1, steps_in_flight=1)
    first = engine.generate([[3, 4]], SamplingParams(max_tokens=20))[0].token_ids
    stop = SamplingParams(max_tokens=20, stop_token_ids=frozenset({first[4]}))
    assert engine.generate([[3, 4]], stop)[0].token_ids == first[: first.index(first[4]) + 1]
    assert engine.generate([[3, 4]], SamplingParams(max_tokens=20))[0].token_ids == first
    assert runner.module.greedy([3, 4], 20) == list(first)


@pytest.mark.parametrize(
    ("sampling", "recorded"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.7, seed=3), True),
        (SamplingParams(temperature=0.7, top_k=3), False),
        (SamplingParams(logprobs=1), False),
        (SamplingParams(min_tokens=2), False),
    ],
)
@pytest.mark.parametrize("decode_in_graph", [False, True])
def test_a_prompt_is_sampled_by_the_decode_graphs_operations_where_they_can(
    sampling: SamplingParams, recorded: bool, decode_in_graph: bool
) -> None:
    _, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=decode_in_graph)
    new = NewRequest(request_id="a", token_ids=(1, 2, 3), prompt_len=3, block_ids=((1, 2),), sampling=sampling)
    parts = (
        StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 2}),
        StepPlan(cached_requests=(CachedRequest(request_id="a", num_computed_tokens=2),), num_scheduled_tokens={"a": 1}),
    )
    found = []
    for plan in parts:
        runner.execute_model(plan)
        assert runner.parked is not None
        in_graph = runner.parked.context is None
        assert in_graph or isinstance(runner.parked.tokens, RecordedTokens) == (recorded and decode_in_graph)
        output = runner.sample_tokens()
        assert output is not None
        found.append(output.get_output().sampled_token_ids[0])
    assert [len(tokens) for tokens in found] == [0, 1]
    if sampling.is_greedy:
        assert found[1] == tuple(runner.module.greedy([1, 2, 3], 1))
