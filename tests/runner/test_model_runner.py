from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rung.counters import Count
from rung.errors import BlockTableError, KVCacheTooSmallError, RequestError, StateError
from rung.runner import EMPTY_OUTPUT, CachedRequest, ModelRunner, NewRequest, SamplingParams, StepPlan
from tests.runner.tiny import TinyModel, make_runner

GREEDY = SamplingParams()


def new(name: str, ids: list[int], blocks: tuple[int, ...], prompt_len: int | None = None) -> NewRequest:
    return NewRequest(request_id=name, token_ids=tuple(ids), prompt_len=prompt_len or len(ids), block_ids=(blocks,), sampling=GREEDY)


def first_plan(name: str = "a", ids: list[int] | None = None, blocks: tuple[int, ...] = (1,), count: int | None = None) -> StepPlan:
    ids = ids or [1, 2, 3]
    return StepPlan(new_requests=(new(name, ids, blocks),), num_scheduled_tokens={name: count or len(ids)})


def run(runner: ModelRunner, plan: StepPlan) -> dict[str, tuple[int, ...]]:
    assert runner.execute_model(plan) is None
    output = runner.sample_tokens()
    assert output is not None
    result = output.get_output()
    return dict(zip(result.request_ids, result.sampled_token_ids, strict=True))


def test_a_second_execute_before_sampling_is_refused() -> None:
    runner = make_runner()
    runner.execute_model(first_plan())
    with pytest.raises(StateError, match=r"^State error: sample_tokens\(\) must be called after execute_model\(\) returns None\."):
        runner.execute_model(StepPlan())
    assert runner.sample_tokens() is not None
    assert runner.execute_model(StepPlan()) is EMPTY_OUTPUT


def test_a_dummy_run_before_sampling_is_refused() -> None:
    runner = make_runner()
    runner.execute_model(first_plan())
    with pytest.raises(StateError, match="a dummy run came before sample_tokens"):
        runner.dummy_run(np.array([1], np.int32))


def test_sampling_with_nothing_parked_gives_none() -> None:
    runner = make_runner()
    assert runner.sample_tokens() is None
    run(runner, first_plan())
    assert runner.sample_tokens() is None


def test_a_plan_without_tokens_is_applied() -> None:
    runner = make_runner()
    run(runner, first_plan())
    calls = len(runner.module.calls)
    assert runner.execute_model(StepPlan(finished_request_ids=frozenset({"a"}))) is EMPTY_OUTPUT
    assert runner.slots.slot_of == {}
    assert len(runner.module.calls) == calls


def test_greedy_tokens_equal_the_model_without_cache() -> None:
    model = TinyModel()
    runner = make_runner(model)
    tokens = [run(runner, first_plan(ids=[4, 5, 6], blocks=(3, 7)))["a"][0]]
    tokens += [run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"][0] for _ in range(20)]
    assert tokens == model.greedy([4, 5, 6], 21)


def test_only_the_last_row_of_each_request_is_projected() -> None:
    runner = make_runner()
    plan = StepPlan(new_requests=(new("a", [1] * 9, (1,)), new("b", [2] * 5, (2,))), num_scheduled_tokens={"a": 9, "b": 5})
    run(runner, plan)
    assert (runner.module.calls, runner.module.projected) == ([14], [2])


def test_a_partly_computed_prompt_samples_nothing() -> None:
    model = TinyModel()
    runner = make_runner(model)
    prompt = list(range(10))
    assert run(runner, first_plan(ids=prompt, count=4)) == {"a": ()}
    assert run(runner, StepPlan(num_scheduled_tokens={"a": 4})) == {"a": ()}
    assert run(runner, StepPlan(num_scheduled_tokens={"a": 2})) == {"a": tuple(model.greedy(prompt, 1))}


def test_a_new_batch_of_decodes_is_one_copy_a_repeated_one_none_and_new_blocks_one() -> None:
    runner = make_runner()
    run(runner, first_plan(ids=[1] * 14))
    for copies in (1, 0):
        with runner.counters.expect(**{Count.HOST_TO_DEVICE_COPIES: copies}):
            run(runner, StepPlan(num_scheduled_tokens={"a": 1}))
    more = CachedRequest(request_id="a", num_computed_tokens=16, new_block_ids=((2,),))
    with runner.counters.expect(**{Count.HOST_TO_DEVICE_COPIES: 1}):
        run(runner, StepPlan(cached_requests=(more,), num_scheduled_tokens={"a": 1}))


def test_prompts_behind_decodes_are_uploaded_and_decodes_behind_them_too() -> None:
    """What one way to build inputs left in the buffers is nothing to the other."""
    model = TinyModel()
    runner = make_runner(model)
    tokens = [run(runner, first_plan(ids=[4, 5, 6], blocks=(1,)))["a"][0]]
    for _ in range(2):
        tokens += run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"]
    other = first_plan("b", ids=[7, 8], blocks=(2,))
    both = replace(other, num_scheduled_tokens={"a": 1, "b": 2})
    found = run(runner, both)
    tokens += found["a"]
    others = list(found["b"])
    for _ in range(2):
        found = run(runner, StepPlan(num_scheduled_tokens={"a": 1, "b": 1}))
        tokens, others = [*tokens, *found["a"]], [*others, *found["b"]]
    tokens += run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"]
    assert tokens == model.greedy([4, 5, 6], 7)
    assert others == model.greedy([7, 8], 3)


def test_a_resumed_request_replaces_its_blocks_and_computes_its_own_tokens_again() -> None:
    model = TinyModel()
    runner = make_runner(model)
    tokens = [run(runner, first_plan(ids=[4, 5, 6], blocks=(1,)))["a"][0]]
    tokens += [run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"][0] for _ in range(3)]
    for cache in runner.kv_caches.values():  # what the old blocks held is lost
        cache.key.fill_(float("nan"))
        cache.value.fill_(float("nan"))
    resumed = CachedRequest(request_id="a", num_computed_tokens=0, new_block_ids=((9,),), resumed=True)
    tokens.append(run(runner, StepPlan(cached_requests=(resumed,), num_scheduled_tokens={"a": 7}))["a"][0])
    assert runner.block_tables[0].batch[0, :2].tolist() == [9, 0]
    tokens += [run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"][0] for _ in range(3)]
    assert tokens == model.greedy([4, 5, 6], 8)


def test_a_preempted_request_enters_again_with_its_output() -> None:
    model = TinyModel()
    runner = make_runner(model)
    first = run(runner, first_plan(ids=[4, 5, 6]))["a"][0]
    second = run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"][0]
    assert runner.execute_model(StepPlan(preempted_request_ids=frozenset({"a"}))) is EMPTY_OUTPUT
    assert len(runner.slots.free_slots) == 8
    again = new("a", [4, 5, 6, first, second], (5,), prompt_len=3)
    third = run(runner, StepPlan(new_requests=(again,), num_scheduled_tokens={"a": 5}))["a"][0]
    assert [first, second, third] == model.greedy([4, 5, 6], 3)


def test_leaving_requests_free_their_slots_in_the_order_of_their_names() -> None:
    runner = make_runner(max_num_requests=4)
    plan = StepPlan(
        new_requests=tuple(new(name, [1], (i + 1,)) for i, name in enumerate("cab")), num_scheduled_tokens=dict.fromkeys("cab", 1)
    )
    run(runner, plan)
    runner.execute_model(StepPlan(finished_request_ids=frozenset("ac"), preempted_request_ids=frozenset("b")))
    assert runner.slots.free_slots == [0, 2, 1, 3]  # a had 2, b 1, c 3


def test_a_dummy_run_takes_the_same_road_and_leaves_no_trace() -> None:
    runner = make_runner()
    run(runner, first_plan())
    before = [(cache.key.clone(), cache.value.clone()) for cache in runner.kv_caches.values()]
    state = runner.slots.num_computed_tokens.clone()
    logits = runner.dummy_run(np.array([1, 1, 5], np.int32))
    assert logits.shape == (3, 97)
    assert runner.module.calls[-1] == 7
    assert all(torch.equal(c.key, k) and torch.equal(c.value, v) for c, (k, v) in zip(runner.kv_caches.values(), before, strict=True))
    assert torch.equal(runner.slots.num_computed_tokens, state)
    assert runner.parked is None
    assert run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"] == (TinyModel().greedy([1, 2, 3], 2)[1],)


def test_all_layers_share_one_metadata_object() -> None:
    runner = make_runner()
    runner.execute_model(first_plan())
    assert runner.parked is not None
    metadata = runner.parked.context.attention_metadata
    assert list(metadata) == ["layers.0.attention", "layers.1.attention"]
    assert len({id(m) for m in metadata.values()}) == 1


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (StepPlan(num_scheduled_tokens={"x": 1}), RequestError, "request 'x' is unknown"),
        (StepPlan(finished_request_ids=frozenset({"x"})), RequestError, "request 'x' leaves but has no slot"),
        (first_plan("a"), RequestError, "new request 'a' has a slot already"),
        (first_plan("b", ids=[1] * 65, blocks=(1, 2, 3, 4, 5)), RequestError, "the plan has 65 tokens, max_num_tokens is 64"),
        (first_plan("b", ids=[1] * 17), BlockTableError, "scheduled up to token 17 and has 1 blocks of 16 tokens"),
        (first_plan("b", blocks=tuple(range(9))), BlockTableError, "holds 8 blocks"),
        (StepPlan(num_scheduled_tokens={"a": 2}), RequestError, "scheduled up to token 5 and has 4"),
        (
            StepPlan(cached_requests=(CachedRequest(request_id="a", num_computed_tokens=9),), num_scheduled_tokens={"a": 1}),
            RequestError,
            "has 3 computed tokens, the plan says 9",
        ),
    ],
)
def test_a_bad_plan_changes_nothing(plan: StepPlan, error: type[Exception], text: str) -> None:
    runner = make_runner()
    first = run(runner, first_plan())["a"]
    with pytest.raises(error, match=text):
        runner.execute_model(plan)
    assert runner.slots.slot_of == {"a": 7}
    assert [*first, *run(runner, StepPlan(num_scheduled_tokens={"a": 1}))["a"]] == TinyModel().greedy([1, 2, 3], 2)


def test_a_kv_cache_that_cannot_hold_one_request_is_refused_with_numbers() -> None:
    with pytest.raises(KVCacheTooSmallError, match=r"gives 8 KV-cache blocks of 16 tokens.*needs 9") as caught:
        make_runner(num_blocks=8)
    assert caught.value.hint == "lower max_model_len to at most 112, or raise the budget"


def test_a_byte_budget_is_divided_by_the_bytes_of_a_block() -> None:
    # 2 layers, keys and values, 16 tokens, 2 heads of 8, 4 bytes
    bytes_per_block = 2 * 2 * 16 * 2 * 8 * 4
    assert make_runner(num_blocks=None, kv_cache_bytes=20 * bytes_per_block + 5).num_blocks == 20


def test_free_memory_is_not_taken_beyond_what_all_slots_could_use() -> None:
    assert make_runner(num_blocks=None, memory_fraction=0.5).num_blocks == 8 * 8 + 1


def test_the_runner_says_which_step_operations_it_has() -> None:
    assert make_runner().ops.name == "torch"
