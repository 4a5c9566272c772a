"""Layers with and without a sliding window in one model: a block table and a pool each."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rung.attention.backends.torch_reference import TorchReference
from rung.counters import Count
from rung.errors import KVCacheTooSmallError, RequestError
from rung.graphs import ConfiguredMode
from rung.runner import CachedRequest, Engine, ModelRunner, NewRequest, RunnerConfig, SamplingParams, Scheduler, StepPlan
from rung.runner.kv_cache import num_kv_blocks
from rung.runner.kv_groups import (
    KVGroup,
    blocks_in,
    blocks_per_request,
    cache_bytes,
    first_block,
    group_blocks,
    kv_groups,
    most_kv_blocks,
)
from tests.runner.test_graph_forward import VOCAB, make
from tests.runner.test_prefix_cache import enters, request, shared_prompts, watch_preemptions
from tests.runner.test_scheduler import answer
from tests.runner.tiny import TinyModel, make_engine, make_runner

WINDOW, BLOCK = 6, 4
WINDOWS = (WINDOW, None)  # the first layer slides; the full group comes first all the same


def config_of(**values: Any) -> RunnerConfig:
    sizes = {"max_num_requests": 6, "max_num_tokens": 16, "max_model_len": 64, "block_size": BLOCK, "long_prefill_chunk": 8}
    return RunnerConfig(**{**sizes, **values})


def groups_of(full: int = 100, sliding: int = 300) -> tuple[KVGroup, ...]:
    return (KVGroup(("full",), None, full), KVGroup(("sliding",), WINDOW, sliding))


# --- sizes ---


def test_layers_are_grouped_by_their_window_and_full_attention_comes_first() -> None:
    model = TinyModel(windows=(6, None, 9, 6, 200))
    groups = kv_groups({layer.attention.name: layer.attention for layer in model.layers}, config_of(), torch.float32)
    assert [group.window for group in groups] == [None, 9, 6]
    assert [[name.split(".")[1] for name in group.layers] for group in groups] == [["1", "4"], ["2"], ["0", "3"]]
    one = 2 * BLOCK * 2 * 8 * 4  # keys and values, tokens, heads, head size, bytes
    assert [group.block_bytes for group in groups] == [2 * one, one, 2 * one]


@pytest.mark.parametrize(("computed", "first"), [(0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_the_first_block_is_the_one_with_the_oldest_key_of_the_next_query(computed: int, first: int) -> None:
    assert first_block(computed, WINDOW, BLOCK) == first == max(0, computed - WINDOW + 1) // BLOCK
    assert first_block(computed, None, BLOCK) == 0


def test_a_group_has_blocks_in_proportion_to_what_its_requests_need() -> None:
    config = config_of()
    assert (blocks_per_request(config, None), blocks_per_request(config, WINDOW)) == (16, 5)
    assert group_blocks(config, (None, WINDOW), 17) == (17, 6)
    assert group_blocks(config, (None, WINDOW), 33) == (33, 11)
    assert group_blocks(config, (WINDOW,), 33) == (33,)
    assert most_kv_blocks(config, groups_of()) == 6 * 16 + 1


@pytest.mark.parametrize("budget", [3500, 3499, 3600, 10_000, 123_456])
def test_a_budget_is_filled_over_all_groups(budget: int) -> None:
    config, groups = config_of(), groups_of()
    blocks = blocks_in(config, groups, budget)
    assert cache_bytes(config, groups, blocks) <= budget < cache_bytes(config, groups, blocks + 1)


def test_a_budget_below_one_request_is_refused_with_the_bytes_of_all_groups() -> None:
    config = config_of(kv_cache_bytes=17 * 100 + 6 * 300 - 1)
    with pytest.raises(KVCacheTooSmallError, match=rf"needs 17, the null block included \({17 * 100 + 6 * 300} bytes\)"):
        num_kv_blocks(config, groups_of(), torch.device("cpu"))


# --- scheduling ---


def scheduler_of(num_blocks: int = 33, **config: Any) -> Scheduler:
    return Scheduler(config_of(**config), num_blocks, (None, WINDOW))


def held(scheduler: Scheduler) -> list[int]:
    return [pool.num_blocks - 1 - pool.num_free for pool in scheduler.blocks.pools]


def test_blocks_behind_the_window_are_freed_when_a_request_grows() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", range(20), output=20))
    most, nulls = 0, []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        nulls += [change.num_null_blocks for change in plan.cached_requests if change.num_null_blocks]
        most = max(most, held(scheduler)[1])
        answer(plan, scheduler)
    assert most <= blocks_per_request(scheduler.config, WINDOW)
    assert nulls == [(0, n) for n in (2, 3, 4, 5, 6, 7)][-len(nulls) :]
    assert len(nulls) >= 5
    assert held(scheduler) == [0, 0]


def test_a_request_that_a_sliding_group_has_no_blocks_for_waits() -> None:
    scheduler = scheduler_of(num_blocks=17, max_model_len=64)
    scheduler.add(request("a", range(8)))
    scheduler.add(request("b", range(100, 108)))
    scheduler.add(request("c", range(200, 208)))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a", "b"]
    assert held(scheduler) == [4, 4]
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a"]  # takes the last sliding block; b is preempted, and c waits


def test_a_prefix_needs_only_the_window_of_a_sliding_group() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", range(24), output=1))
    while scheduler.has_unfinished:
        answer(scheduler.schedule(), scheduler)
    full, sliding = scheduler.blocks.pools
    for key in _keys(sliding)[:3]:  # the oldest three blocks are lost
        sliding._forget(sliding.find(key))  # type: ignore[arg-type]
    assert full.num_kept == 6
    new = enters(scheduler, [*range(20), 70, 71], "b")
    assert new.num_computed_tokens == 20
    assert [ids.count(0) for ids in new.block_ids] == [0, 3]
    assert enters(scheduler, [*range(12), 72, 73], "c").num_computed_tokens == 0  # blocks 1 and 2 would be needed


def _keys(pool: Any) -> list[bytes]:
    return list(pool._block_of)


# --- running ---


def test_the_window_matters_to_these_tokens() -> None:
    prompts = shared_prompts(0, 12)
    slides, full = (strong_attention(TinyModel(windows=windows)) for windows in (WINDOWS, (None, None)))
    assert sum(slides.greedy(prompt, 14) != full.greedy(prompt, 14) for prompt in prompts) > 6


@torch.no_grad()
def strong_attention(model: TinyModel) -> TinyModel:
    """Make the tokens depend on what is attended to."""
    for layer in model.layers:
        layer.qkv.weight.mul_(3)
        layer.out.weight.mul_(4)
    return model


def wanted(runner: ModelRunner, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [runner.module.greedy(prompt, count) for prompt in prompts]  # type: ignore[operator]


def check_tokens(engine: Engine, runner: ModelRunner, seed: int = 0, output: int = 14) -> None:
    strong_attention(runner.module)  # type: ignore[arg-type]
    prompts = shared_prompts(seed, 12)
    completions = engine.generate(prompts, SamplingParams(max_tokens=output))
    assert [list(c.token_ids) for c in completions] == wanted(runner, prompts, output)
    assert held(engine.scheduler) == [0, 0]


@pytest.mark.parametrize("num_blocks", [11, 120])
@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_tokens_are_those_of_the_model_without_cache(num_blocks: int, steps_in_flight: int) -> None:
    engine, runner = make_engine(
        TinyModel(windows=WINDOWS),
        backend=TorchReference,
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=40,
        long_prefill_chunk=7,
        steps_in_flight=steps_in_flight,
    )
    preemptions = watch_preemptions(engine.scheduler)
    check_tokens(engine, runner, steps_in_flight)
    assert bool(preemptions) == (num_blocks == 11)
    assert (engine.scheduler.counters[Count.PREFIX_HIT_TOKENS] > 8) == (num_blocks == 120)


@pytest.mark.parametrize("mode", [ConfiguredMode.PIECEWISE, ConfiguredMode.FULL, ConfiguredMode.FULL_AND_PIECEWISE])
@pytest.mark.parametrize("decode_in_graph", [False, True])
def test_every_mode_gives_the_same_tokens(mode: ConfiguredMode, decode_in_graph: bool) -> None:
    engine, runner, forward = make(
        mode, backend=TorchReference, windows=WINDOWS, num_blocks=17, decode_in_graph=decode_in_graph, long_prefill_chunk=6
    )
    check_tokens(engine, runner)
    modes = {name.split(".")[1] for name in forward.manager.counters if name.startswith("step.")}
    assert modes - {"none"} == set(mode.value.replace("_and_", " ").split())


@pytest.mark.parametrize("replay_steps", [1, 4])
def test_decode_graphs_advance_over_every_table(replay_steps: int) -> None:
    engine, runner, forward = make(
        ConfiguredMode.FULL_AND_PIECEWISE,
        backend=TorchReference,
        windows=WINDOWS,
        num_blocks=24,
        decode_in_graph=True,
        replay_steps=replay_steps,
    )
    check_tokens(engine, runner, seed=3)
    assert forward.manager.counters["step.full.best"] > 10
    engine.generate([list(range(5))], SamplingParams(max_tokens=20))
    assert forward.manager.counters[Count.REPLAYS] > 20


def test_the_freed_front_of_a_row_is_the_null_block_on_the_device() -> None:
    engine, runner = make_engine(TinyModel(windows=WINDOWS), backend=TorchReference, block_size=BLOCK, long_prefill_chunk=8)
    engine.add_request(list(range(30)), SamplingParams(max_tokens=12))
    for _ in range(8):
        engine.step()
    slot = runner.slots.slot_of["request-0"]
    full, sliding = (table.table[slot].tolist() for table in runner.block_tables)
    first = first_block(int(runner.slots.num_computed_tokens_np[slot]), WINDOW, BLOCK)
    assert first >= 6
    assert sliding[: first - 1] == [0] * (first - 1)
    assert all(sliding[first : first + 2])
    assert all(full[: first + 2])


def test_a_slot_that_is_used_again_has_a_whole_row() -> None:
    engine, runner = make_engine(
        TinyModel(windows=WINDOWS), backend=TorchReference, block_size=BLOCK, max_num_requests=1, long_prefill_chunk=8
    )
    chance = random.Random(0)
    for _ in range(3):
        prompt = [chance.randrange(VOCAB) for _ in range(25)]
        completion = engine.generate([prompt], SamplingParams(max_tokens=12))[0]
        assert [list(completion.token_ids)] == wanted(runner, [prompt], 12)


def test_blocks_that_the_window_still_reaches_cannot_become_null() -> None:
    runner = make_runner(TinyModel(windows=WINDOWS), backend=TorchReference, block_size=BLOCK)
    new = NewRequest(request_id="a", token_ids=tuple(range(8)), prompt_len=8, block_ids=((1, 2), (1, 2)), sampling=SamplingParams())
    runner.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 8}))
    runner.sample_tokens()
    change = CachedRequest(request_id="a", num_computed_tokens=8, new_block_ids=((3,), (3,)), num_null_blocks=(0, 1))
    with pytest.raises(RequestError, match="1 blocks of request 'a' become null, 0 lie behind the window"):
        runner.execute_model(StepPlan(cached_requests=(change,), num_scheduled_tokens={"a": 1}))
