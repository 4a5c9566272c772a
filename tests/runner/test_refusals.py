"""What is refused changes nothing: requests that run go on to the same tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from rung.errors import BlockTableError, PromptTooLongError, RequestError, RungError, SamplingParamsError, StateError, StepFailedError
from rung.graphs import ConfiguredMode
from rung.runner import CachedRequest, ModelRunner, NewRequest, SamplingParams, StepPlan
from tests.runner.test_engine import assert_nothing_left, drain
from tests.runner.test_graph_forward import make
from tests.runner.test_model_runner import new, run
from tests.runner.tiny import VOCAB, TinyModel, make_engine, make_runner

BOTH = {"a": 1, "b": 1}
START = StepPlan(new_requests=(new("a", [1, 2, 3], (1,)), new("b", [4, 5], (2,))), num_scheduled_tokens={"a": 3, "b": 2})
NEW = new("c", [7], (3,))


def state(runner: ModelRunner) -> list[object]:
    """Everything that belongs to requests, on the host and on the device."""
    slots, table = runner.slots, runner.block_tables[0]
    tensors = [slots.all_token_ids, slots.last_sampled_tokens, slots.num_computed_tokens, slots.total_len, slots.prefill_len, table.table]
    tensors += [table.num_blocks, *(part for cache in runner.kv_caches.values() for part in (cache.key, cache.value))]
    host = [dict(slots.slot_of), list(slots.free_slots), slots.total_len_np.tolist(), slots.num_computed_tokens_np.tolist()]
    return [
        *host,
        table.num_blocks_np.tolist(),
        deepcopy(table.rows),
        dict(table.owners),
        *(tensor.numpy().tobytes() for tensor in tensors),
    ]


BAD_PLANS: dict[str, StepPlan] = {
    "request 'x' is unknown": StepPlan(num_scheduled_tokens={**BOTH, "x": 1}),
    "request 'y' is unknown": StepPlan(cached_requests=(CachedRequest(request_id="y", num_computed_tokens=0),), num_scheduled_tokens=BOTH),
    "request 'z' leaves but has no slot": StepPlan(preempted_request_ids=frozenset("z"), num_scheduled_tokens=BOTH),
    "new request 'a' has a slot already": StepPlan(new_requests=(replace(NEW, request_id="a"),), num_scheduled_tokens=BOTH),
    "a new request comes twice": StepPlan(new_requests=(NEW, NEW), num_scheduled_tokens={**BOTH, "c": 1}),
    "a cached request comes twice": StepPlan(cached_requests=(CachedRequest(request_id="a", num_computed_tokens=3),) * 2),
    "request 'b' is unknown": StepPlan(finished_request_ids=frozenset("b"), num_scheduled_tokens=BOTH),
    "request 'b' is scheduled with 0 tokens": StepPlan(num_scheduled_tokens={"a": 1, "b": 0}),
    "new request 'c' has 1 tokens and prompt_len 2": StepPlan(new_requests=(replace(NEW, prompt_len=2),), num_scheduled_tokens={"c": 1}),
    "block ids for 2 KV-cache groups": StepPlan(new_requests=(replace(NEW, block_ids=((3,), (3,))),), num_scheduled_tokens={"c": 1}),
    "1 new requests come and 0 of 2 slots": StepPlan(new_requests=(NEW,), num_scheduled_tokens={**BOTH, "c": 1}),
}


def comes(**changes: Any) -> StepPlan:
    """Request "c" comes while "b" leaves, with something wrong."""
    count = changes.pop("count", 1)
    return StepPlan(new_requests=(replace(NEW, **changes),), num_scheduled_tokens={"a": 1, "c": count}, finished_request_ids=frozenset("b"))


def grows(block: int) -> StepPlan:
    change = CachedRequest(request_id="a", num_computed_tokens=3, new_block_ids=((block,),))
    return StepPlan(cached_requests=(change,), num_scheduled_tokens=BOTH)


LAST = 65  # behind the last block
BAD_PLANS |= {
    f"token 1 is {VOCAB}, expected an id": comes(token_ids=(7, VOCAB), prompt_len=2),
    "token 0 is -1, expected an id": comes(token_ids=(-1,)),
    "token 0 is 1.5, expected an id": comes(token_ids=(1.5,)),
    "new request 'c' has 0 tokens": comes(token_ids=(), prompt_len=0),
    "'c' has 129 tokens, max_model_len is 128": comes(token_ids=(1,) * 129),
    "of which -1 are said to be computed": comes(num_computed_tokens=-1),
    "of which 1 are said to be computed": comes(num_computed_tokens=1),
    "request 'c' is scheduled with -1 tokens": comes(count=-1),
    "request 'c' is scheduled with 1.0 tokens": comes(count=1.0),
    "request 'c' is scheduled up to token 2 and has 1": comes(count=2),
    "request 'c': logit_bias has token": comes(sampling=SamplingParams(logit_bias={VOCAB: 1.0})),
    "request 'c': logprobs is": comes(sampling=SamplingParams(logprobs=VOCAB + 1)),
    "request 'c' gets block 0, expected": comes(block_ids=((0,),)),
    "request 'c' gets block -1, expected": comes(block_ids=((-1,),)),
    f"request 'c' gets block {LAST}, expected": comes(block_ids=((LAST,),)),
    "request 'c' gets block 1, which another row has": comes(block_ids=((1,),)),
    "request 'c' gets block 5, which another row has": comes(block_ids=((5, 5),)),
    "request 'a' gets block 2, which another row has": grows(2),
    "block 2 is written in the plan that shares it": StepPlan(
        new_requests=(
            replace(NEW, block_ids=((2,),)),
            replace(NEW, request_id="d", token_ids=(1,) * 17, prompt_len=17, block_ids=((2, 6),), num_computed_tokens=16),
        ),
        num_scheduled_tokens={"c": 1, "d": 1},
        finished_request_ids=frozenset("ab"),
    ),
    "new request 3: its id is no text": comes(request_id=3),
    "resumed request 'a' has 4 tokens, of which 4": StepPlan(
        cached_requests=(CachedRequest(request_id="a", num_computed_tokens=4, new_block_ids=((1,),), resumed=True),),
        num_scheduled_tokens={"b": 1},
    ),
}


@pytest.mark.parametrize("text", BAD_PLANS)
def test_bad_plan_is_named_and_changes_nothing(text: str) -> None:
    runner = make_runner(max_num_requests=2)
    tokens = [run(runner, START)]
    before = state(runner)
    with pytest.raises((RequestError, BlockTableError), match=text) as caught:
        runner.execute_model(BAD_PLANS[text])
    assert caught.value.hint
    assert runner.parked is None
    assert state(runner) == before
    tokens += [run(runner, StepPlan(num_scheduled_tokens=BOTH)) for _ in range(3)]
    assert [step["a"][0] for step in tokens] == TinyModel().greedy([1, 2, 3], 4)
    assert [step["b"][0] for step in tokens] == TinyModel().greedy([4, 5], 4)


@pytest.mark.parametrize("in_graph", [False, True])
def test_second_execute_is_not_applied(in_graph: bool) -> None:
    """The parked step keeps its tokens, also when a graph has sampled it already."""
    _, runner, _ = make(ConfiguredMode.FULL_AND_PIECEWISE, decode_in_graph=in_graph, block_size=16)
    tokens = [run(runner, START)]
    more = StepPlan(new_requests=(NEW,), num_scheduled_tokens={**BOTH, "c": 1}, finished_request_ids=frozenset("b"))
    for _ in range(3):
        assert runner.execute_model(StepPlan(num_scheduled_tokens=BOTH)) is None
        before = state(runner)
        for plan in (more, StepPlan(num_scheduled_tokens={"x": 1}), StepPlan()):
            with pytest.raises(StateError, match="sample_tokens"):
                runner.execute_model(plan)
        assert state(runner) == before
        output = runner.sample_tokens()
        assert output is not None
        result = output.get_output()
        tokens.append(dict(zip(result.request_ids, result.sampled_token_ids, strict=True)))
    assert [step["a"][0] for step in tokens] == runner.module.greedy([1, 2, 3], 4)
    assert [step["b"][0] for step in tokens] == runner.module.greedy([4, 5], 4)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "text"),
    [
        ([1, VOCAB], {}, RequestError, f"token 1 of the prompt is {VOCAB}"),
        ([2**40], {}, RequestError, "token 0 of the prompt"),
        ([1.0], {}, RequestError, "token 0 of the prompt is 1.0"),
        ([1] * 128, {}, PromptTooLongError, "the prompt has 128 tokens"),
        ([1], {"temperature": -1.0}, SamplingParamsError, "temperature must be"),
        ([1], {"top_p": float("nan")}, SamplingParamsError, "top_p must be"),
        ([1], {"stop_token_ids": [VOCAB]}, SamplingParamsError, "stop_token_ids has token"),
    ],
)
def test_one_bad_prompt_schedules_none_of_its_call_and_harms_no_other(
    prompt: list[int], params: dict[str, object], error: type[RungError], text: str
) -> None:
    model = TinyModel()
    engine, runner = make_engine(model)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=8), request_id="good")
    engine.step()
    engine.step()
    with pytest.raises(error, match=text) as caught:
        engine.generate([[5, 6], prompt], [SamplingParams(max_tokens=3), SamplingParams(**params)])  # type: ignore[arg-type]
    assert caught.value.hint
    assert engine.scheduler.requests.keys() == {"good"}
    done = drain(engine)
    assert (done.keys(), list(done["good"].token_ids)) == ({"good"}, model.greedy([1, 2, 3], 8))
    assert_nothing_left(engine, runner)


def test_id_of_a_cancelled_request_may_be_used_again_at_once() -> None:
    """What the cancelled one has in flight belongs to nobody."""
    model = TinyModel()
    engine, runner = make_engine(model, steps_in_flight=2)
    engine.add_request([9, 8, 7, 6], SamplingParams(max_tokens=5, prompt_logprobs=1, logprobs=1), request_id="a")
    engine.step()
    engine.abort("a")
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=1), request_id="a")
    completion = drain(engine)["a"]
    assert list(completion.token_ids) == model.greedy([1, 2, 3], 3)
    assert [one.token_id for one in completion.logprobs or ()] == list(completion.token_ids)
    assert completion.prompt_logprobs is not None
    assert [one and one.token_id for one in completion.prompt_logprobs] == [None, 2, 3]
    assert_nothing_left(engine, runner)


def test_blocks_of_who_leaves_may_be_given_out_in_the_same_plan() -> None:
    runner = make_runner(max_num_requests=2)
    run(runner, START)
    sampled = run(runner, comes(block_ids=((2,),)))
    assert sampled["c"] == tuple(TinyModel().greedy([7], 1))
    assert runner.block_tables[0].owners == {1: 1, 2: 1}


def test_computed_blocks_may_be_shared_and_the_next_one_may_not() -> None:
    runner = make_runner(max_num_requests=3)
    prompt = tuple(range(1, 18))
    first = NewRequest(request_id="a", token_ids=prompt, prompt_len=17, block_ids=((1, 2),), sampling=SamplingParams())
    run(runner, StepPlan(new_requests=(first,), num_scheduled_tokens={"a": 17}))
    second = replace(first, request_id="b", num_computed_tokens=16)
    with pytest.raises(BlockTableError, match="request 'b' gets block 2, which another row has"):
        runner.execute_model(StepPlan(new_requests=(second,), num_scheduled_tokens={"b": 1}))
    sampled = run(runner, StepPlan(new_requests=(replace(second, block_ids=((1, 3),)),), num_scheduled_tokens={"b": 1}))
    assert sampled["b"] == tuple(TinyModel().greedy(list(prompt), 1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": float("inf")},
        {"stop": [""]},
        {"top_k": 1.5},
        {"top_k": 2**31},
        {"top_k": 2**63},
        {"min_tokens": 2**63},
        {"min_tokens": 2**63, "max_tokens": 2**64},
        {"logprobs": 2**63},
        {"prompt_logprobs": 2**63},
        {"seed": 2**63},
        {"stop_token_ids": [2**63]},
        {"stop_token_ids": [[1]]},
        {"stop_token_ids": {1: 2}},
        {"allowed_token_ids": [[1]]},
        {"allowed_token_ids": b"ab"},
        {"bad_words": [[[1]]]},
        {"bad_words": [[2**63]]},
        {"logit_bias": {2**63: 1.0}},
        {"ignore_eos": "no"},
        {"ignore_eos": None},
    ],
    ids=str,
)
def test_bad_parameters_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match=next(iter(wrong))) as caught:
        SamplingParams(**wrong)
    assert caught.value.hint


def test_the_largest_counts_are_served() -> None:
    engine, runner = make_engine()
    most = 2**31 - 1
    engine.add_request([1, 2], SamplingParams(top_k=most, min_tokens=most, temperature=1.0, seed=2**63 - 1), request_id="a")
    engine.add_request([1, 2], SamplingParams(max_tokens=2**70, seed=-(2**63)), request_id="b")
    assert {name: len(one.token_ids) for name, one in drain(engine).items()} == {"a": 126, "b": 126}
    assert_nothing_left(engine, runner)


@pytest.mark.parametrize("stops", [(2**63,), (1, "a")], ids=["written", "stored"])
def test_what_fails_while_a_plan_is_applied_does_not_fail_again(stops: Any) -> None:
    """Neither do its requests stay: all of them have a slot to leave, those behind the one that failed too."""
    runner = make_runner(max_num_requests=2)
    bad = replace(START, new_requests=(replace(START.new_requests[0], stop_token_ids=stops), START.new_requests[1]))
    with pytest.raises(StepFailedError):
        runner.execute_model(bad)
    runner.execute_model(StepPlan(finished_request_ids=frozenset("ab")))
    tokens = [run(runner, START), run(runner, StepPlan(num_scheduled_tokens=BOTH))]
    assert [step["a"][0] for step in tokens] == TinyModel().greedy([1, 2, 3], 2)
    assert [step["b"][0] for step in tokens] == TinyModel().greedy([4, 5], 2)


def test_state_tells_a_change() -> None:
    runner = make_runner(max_num_requests=2)
    run(runner, START)
    before = state(runner)
    runner.kv_caches["layers.0.attention"].value[1, 0] += torch.ones(())
    assert state(runner) != before
