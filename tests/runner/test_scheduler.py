from __future__ import annotations

from typing import Any

import pytest

from rung.errors import ConfigError, RequestError
from rung.runner import FinishReason, ModelRunnerOutput, Request, RunnerConfig, SamplingParams, Scheduler, StepPlan


def make(num_blocks: int = 33, **config: int) -> Scheduler:
    values = {"max_num_requests": 4, "max_num_tokens": 32, "max_model_len": 64, "block_size": 4, **config}
    return Scheduler(RunnerConfig(**values), num_blocks)  # type: ignore[arg-type]


def request(name: str, prompt: int, output: int = 8, stop: frozenset[int] = frozenset()) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(ord(name[-1]) * 100 + i for i in range(prompt)),
        sampling=SamplingParams(),
        max_total_tokens=prompt + output,
        stop_token_ids=stop,
    )


def answer(plan: StepPlan, scheduler: Scheduler, token: int = 7) -> None:
    """A runner's answer: a token for each request whose known tokens are all computed."""
    ids = tuple(plan.num_scheduled_tokens)
    tokens = tuple((token,) if scheduler.requests[i].num_in_flight else () for i in ids)
    scheduler.update(ModelRunnerOutput(request_ids=ids, sampled_token_ids=tokens))


def test_long_prompts_are_cut_to_the_budget() -> None:
    scheduler = make()
    scheduler.add(request("a", 50))
    scheduler.add(request("b", 10))
    counts = []
    for _ in range(3):
        plan = scheduler.schedule()
        counts.append(dict(plan.num_scheduled_tokens))
        answer(plan, scheduler)
    assert counts == [{"a": 32}, {"a": 18, "b": 10}, {"a": 1, "b": 1}]


def test_chunks_of_a_prompt_have_a_size_of_their_own() -> None:
    scheduler = make(long_prefill_chunk=6)
    scheduler.add(request("a", 14))
    counts = []
    for _ in range(3):
        plan = scheduler.schedule()
        counts.append(plan.num_scheduled_tokens["a"])
        answer(plan, scheduler)
    assert counts == [6, 6, 2]


def test_no_more_requests_run_than_there_are_slots() -> None:
    scheduler = make()
    for i in range(6):
        scheduler.add(request(f"r{i}", 2))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(("num_blocks", "output", "grown"), [(33, 40, 4), (33, 8, 2), (5, 40, 1)], ids=["plenty", "nearly over", "scarce"])
def test_blocks_come_with_the_tokens_that_need_them(num_blocks: int, output: int, grown: int) -> None:
    """And while they are plenty with some for the tokens behind those, up to the longest that the request can become."""
    scheduler = make(num_blocks)
    scheduler.add(request("a", 5, output=output))
    first = scheduler.schedule()
    answer(first, scheduler)
    assert [len(r.block_ids[0]) for r in first.new_requests] == [2]
    new_blocks = []
    for _ in range(4):
        plan = scheduler.schedule()
        new_blocks.append([blocks for request in plan.cached_requests for blocks in request.new_block_ids[0]])
        answer(plan, scheduler)
    assert [len(blocks) for blocks in new_blocks] == [0, 0, 0, grown]


def test_a_step_can_be_scheduled_before_the_last_one_is_known() -> None:
    scheduler = make()
    scheduler.add(request("a", 3, output=3))
    plans = [scheduler.schedule() for _ in range(4)]
    assert [dict(p.num_scheduled_tokens) for p in plans] == [{"a": 3}, {"a": 1}, {"a": 1}, {}]
    assert [(r.num_computed_tokens, len(r.new_block_ids[0])) for r in plans[2].cached_requests] == [(4, 1)]
    one = ModelRunnerOutput(request_ids=("a",), sampled_token_ids=((5,),))
    updates = [scheduler.update(one) for _ in range(3)]
    assert updates[-1][0][0].finish_reason is FinishReason.LENGTH
    assert scheduler.schedule().finished_request_ids == {"a"}


def test_a_token_behind_the_end_is_dropped() -> None:
    scheduler = make()
    scheduler.add(request("a", 3, stop=frozenset({5})))
    scheduler.schedule()
    scheduler.schedule()
    one = ModelRunnerOutput(request_ids=("a",), sampled_token_ids=((5,),))
    (finished, tokens) = scheduler.update(one)[0]
    assert (finished.finish_reason, tokens) == (FinishReason.STOP, (5,))
    assert scheduler.update(one) == []
    assert finished.output_token_ids == [5]


def test_without_blocks_the_last_request_is_preempted_and_comes_back() -> None:
    scheduler = make(num_blocks=17)  # 16 blocks of 4: one request of the maximum length
    scheduler.add(request("a", 30, output=20))
    scheduler.add(request("b", 30, output=20))
    preempted_at, steps = None, 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        if plan.preempted_request_ids:
            assert plan.preempted_request_ids == {"b"}
            preempted_at = preempted_at or steps
        answer(plan, scheduler)
        steps += 1
        assert steps < 200
    assert preempted_at is not None
    assert scheduler.blocks.num_free == 16


def test_a_preempted_request_brings_its_output_along() -> None:
    scheduler = make(num_blocks=17)
    scheduler.add(request("a", 30, output=20))
    b = request("b", 30, output=20)
    scheduler.add(b)
    entries = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        entries += [(len(r.token_ids), r.prompt_len) for r in plan.new_requests if r.request_id == "b"]
        answer(plan, scheduler)
    assert entries[0] == (30, 30)
    assert entries[1][0] > 30
    assert entries[1][1] == 30
    assert len(b.output_token_ids) == 20


def test_finishing_a_waiting_request_needs_no_runner() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    scheduler.finish("a", FinishReason.ABORT)
    assert not scheduler.has_work
    scheduler.finish("a", FinishReason.ABORT)


def test_an_id_in_use_is_refused() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        scheduler.add(request("a", 3))


BAD: list[dict[str, Any]] = [
    {"max_num_requests": 0},
    {"max_num_tokens": 2},
    {"block_size": 0},
    {"max_model_len": 1},
    {"graphs": "all"},
    {"replay_steps": "4"},
    {"replay_steps": 1.5},
    {"capture_seconds": "1"},
    {"capture_seconds": None},
    {"capture_seconds": float("nan")},
    {"freeze_heap": "yes"},
    {"capture_sizes": 8},
    {"capture_sizes": "8"},
    {"capture_sizes": ("8",)},
    {"capture_sizes": ()},
    {"max_waste": "a"},
    {"max_waste": float("nan")},
    {"max_waste": True},
    {"memory_fraction": "a"},
    {"memory_fraction": float("nan")},
    {"decode_query_lens": 1},
    {"decode_query_lens": (1.5,)},
    {"decode_in_graph": "no"},
    {"prefix_cache": "no"},
    {"lazy_capture": 1},
    {"nvtx": "no"},
    {"eager": "no"},
    {"batch_invariant": None},
    {"step_trace": 3},
    {"attention_backend": 3},
    {"capture_sizes": (4, 200)},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_settings_are_refused_with_a_hint(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}.*\n?hint: "):
        make(**bad)
