"""The runner over captured graphs, on the recording backend; the plan is cut by hand where the splitter would cut it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rung.attention import AttentionBackend, CaptureSupport
from rung.attention.backends.torch_reference import TorchReference
from rung.compile.bound import BoundStep, StepRunner
from rung.config import AddressPolicy
from rung.counters import Count
from rung.graphs import ConfiguredMode, Dispatcher, GraphMode, Ladder, make_backend, plan_descriptors
from rung.graphs.guard import Addresses, module_tensors
from rung.runner import Engine, InProcessExecutor, ModelRunner, NewRequest, RunnerConfig, SamplingParams, Scheduler, StepPlan
from rung.runner.batch import Batch, dummy_batch, gather_batch
from rung.runner.graph_forward import GraphForward
from tests.runner.tiny import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, VOCAB, PlainAttention, TinyLayer, TinyModel


class DeviceAttention(PlainAttention):
    """Reads no length on the host: every row gathers its keys up to the bound."""

    name = "device"
    capture_support = CaptureSupport.ALWAYS

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: Any, slot_mapping: torch.Tensor) -> None:
        if slot_mapping.shape[0] == 0:
            return
        real = (slot_mapping >= 0)[:, None, None]
        # Rows without a slot write the null block's first place, whose content nobody attends to.
        slot = slot_mapping.clamp(min=0)
        for new, flat in ((key, cache.key.flatten(0, 1)), (value, cache.value.flatten(0, 1))):
            flat.index_copy_(0, slot, torch.where(real, new, 0))

    def forward(self, query: torch.Tensor, cache: Any, out: torch.Tensor, metadata: Any) -> None:
        starts, lens = metadata.query_start_loc, metadata.seq_lens
        rows = torch.arange(query.shape[0], dtype=torch.int32)
        request = torch.searchsorted(starts[1:], rows, right=True).clamp(max=metadata.num_requests - 1)
        position = lens[request] - (starts[request + 1] - rows)
        real = rows < starts[-1]
        length = -(-metadata.max_seq_len // cache.block_size) * cache.block_size
        key_at = torch.arange(length)
        slots = metadata.block_table[request][:, key_at // cache.block_size].long() * cache.block_size + key_at % cache.block_size
        keys = cache.key.flatten(0, 1)[slots].repeat_interleave(HEADS // KV_HEADS, 2)  # [rows, length, heads, size]
        values = cache.value.flatten(0, 1)[slots].repeat_interleave(HEADS // KV_HEADS, 2)
        scores = torch.einsum("rhd,rlhd->rhl", query, keys) * self.spec.scale
        visible = (key_at <= position[:, None]) & real[:, None]
        values = torch.where(visible[:, :, None, None], values, 0)  # places behind the last key may hold NaN
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        out.copy_(torch.where(real[:, None, None], torch.einsum("rhl,rlhd->rhd", weights, values), 0))


class HandPlan:
    """TinyModel as pieces and breaks."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model
        self.steps = [BoundStep("piece", "first", lambda a: self._first(*a))]
        for i, layer in enumerate(model.layers):
            self.steps.append(BoundStep("break", f"attention_{i}", lambda a, name=layer.attention.name: self._attend(name, *a)))
            following = model.layers[i + 1] if i + 1 < len(model.layers) else None
            self.steps.append(BoundStep("piece", f"after_{i}", lambda a, la=layer, lb=following: self._after(la, lb, *a)))

    def _first(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        x = self.model.tokens(ids) + self.model.places(positions)
        return [x, *self._qkv(self.model.layers[0], x)]

    def _attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        torch.ops.rung.attention(q, k, v, out, name, torch.ops.rung.kv_cache_write(k, v, name))
        return []

    def _after(self, layer: TinyLayer, following: TinyLayer | None, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        x = x + layer.out(out.flatten(1))
        x = x + layer.mlp(F.layer_norm(x, (HIDDEN,)))
        return [x] if following is None else [x, *self._qkv(following, x)]

    @staticmethod
    def _qkv(layer: TinyLayer, x: torch.Tensor) -> list[torch.Tensor]:
        qkv = layer.qkv(F.layer_norm(x, (HIDDEN,))).unflatten(-1, (-1, HEAD_SIZE))
        q, k, v = (part.contiguous() for part in qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1))
        return [q, k, v, torch.empty_like(q)]

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner) -> list[Any]:
        x, *qkv = runner(self.steps[0], list(inputs))
        for attend, after in zip(self.steps[1::2], self.steps[2::2], strict=True):
            runner(attend, list(qkv))
            x, *qkv = runner(after, [x, qkv[3]])
        return [x]

    weights = ()  # it reads the module's tensors whenever it runs

    @property
    def joined(self) -> HandPlan:
        return self

    def rebind(self, owner: object) -> None:
        return None

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return flat[0]

    def __call__(self, *inputs: Any) -> Any:
        return self.restore(self.run_steps(inputs, lambda step, arguments: step.call(arguments)), inputs)


def make(
    mode: ConfiguredMode,
    *,
    lazy: bool = False,
    top: int = 16,
    backend: type[AttentionBackend] = DeviceAttention,
    query_lens: tuple[int, ...] = (1,),
    policy: AddressPolicy = "raise",
    windows: tuple[int | None, ...] = (None, None),
    **sizes: Any,
) -> tuple[Engine, ModelRunner, GraphForward]:
    model = TinyModel(windows=windows)
    values = {"max_num_requests": 6, "max_num_tokens": 16, "max_model_len": 64, "num_blocks": 40, "block_size": 4, **sizes}
    config = RunnerConfig(**values)
    limits = {"max_num_requests": config.max_num_requests, "uniform_query_lens": query_lens, "capture_support": backend.capture_support}
    descriptors = plan_descriptors(Ladder.up_to(top), mode, **limits)  # type: ignore[arg-type]
    addresses = Addresses(watched=lambda: module_tensors(model), on_change=policy, part=1000)  # everything in each step
    forward = GraphForward(
        HandPlan(model), make_backend("cpu", "recorded"), descriptors, config, vocab_size=VOCAB, device="cpu", addresses=addresses
    )
    runner = ModelRunner(model, config, backend=backend, forward=forward)
    forward.capture(runner.dummy_context, lazy=lazy)
    return Engine(InProcessExecutor(runner), Scheduler(config, runner.num_blocks, runner.windows), vocab_size=VOCAB), runner, forward


def prompts_of(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 25))] for _ in range(7)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", [ConfiguredMode.PIECEWISE, ConfiguredMode.FULL, ConfiguredMode.FULL_AND_PIECEWISE])
def test_every_mode_gives_the_tokens_of_the_model_without_cache(mode: ConfiguredMode, lazy: bool) -> None:
    engine, runner, forward = make(mode, lazy=lazy)
    completions = engine.generate(prompts_of(1), SamplingParams(max_tokens=9))
    assert [list(c.token_ids) for c in completions] == [runner.module.greedy(p, 9) for p in prompts_of(1)]
    counts = forward.manager.counters
    assert counts[Count.REPLAYS] > 0
    modes = {name.split(".")[1] for name in counts if name.startswith("step.")}
    assert (
        modes - {"none"}
        == {
            ConfiguredMode.PIECEWISE: {"piecewise"},
            ConfiguredMode.FULL: {"full"},
            ConfiguredMode.FULL_AND_PIECEWISE: {"full", "piecewise"},
        }[mode]
    )


def test_a_full_decode_step_calls_no_module() -> None:
    engine, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=6))
    updates = engine.step()
    calls = []
    forward._plan.run_steps = lambda *a: calls.append(a)  # type: ignore[method-assign]
    while engine.has_work:
        updates += engine.step()
    assert calls == []
    assert [t for u in updates for t in u.token_ids] == runner.module.greedy([1, 2, 3], 6)


def test_a_capture_leaves_a_prepared_step_as_it_was() -> None:
    _, runner, _ = make(ConfiguredMode.PIECEWISE, lazy=True)
    new = NewRequest(request_id="a", token_ids=(5, 6, 7), prompt_len=3, block_ids=((1,),), sampling=SamplingParams())
    runner.execute_model(StepPlan(new_requests=(new,), num_scheduled_tokens={"a": 3}))  # captures now
    assert runner.buffers.positions[:3].tolist() == [0, 1, 2]
    assert runner.buffers.query_start_loc.tolist() == [0, 3, 3, 3, 3, 3, 3]
    assert runner.block_tables[0].batch[0, 0] == 1
    assert runner.block_tables[0].slot_mapping[:4].tolist() == [4, 5, 6, -1]
    output = runner.sample_tokens()
    assert output is not None
    assert output.get_output().sampled_token_ids == (tuple(runner.module.greedy([5, 6, 7], 1)),)


def test_tv5_a_mixed_batch_runs_piecewise_304_and_three_decodes_run_full_4() -> None:
    dispatcher = Dispatcher(plan_descriptors(Ladder.for_requests(1024), ConfiguredMode.FULL_AND_PIECEWISE, max_num_requests=1024))
    mixed = dummy_batch(np.array([1, 1, 298], np.int32))
    shape = mixed.shape
    chosen = dispatcher.dispatch(shape).descriptor
    assert (chosen.mode, chosen.num_tokens, chosen.num_requests) == (GraphMode.PIECEWISE, 304, None)
    decodes = dispatcher.dispatch(dummy_batch(np.array([1, 1, 1], np.int32), decode=True).shape).descriptor
    assert (decodes.mode, decodes.num_tokens, decodes.num_requests) == (GraphMode.FULL, 4, 4)


def test_a_dummy_run_goes_through_the_graphs() -> None:
    _, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE)
    replays = forward.manager.counters[Count.REPLAYS]
    runner.dummy_run(np.array([1, 1, 1], np.int32), decode=True)
    runner.dummy_run(np.array([7], np.int32))
    assert forward.manager.counters[Count.REPLAYS] == replays + 2


def test_a_step_above_the_ladder_runs_the_plan_and_says_why() -> None:
    engine, runner, forward = make(ConfiguredMode.PIECEWISE, top=8)
    (completion,) = engine.generate([list(range(16))], SamplingParams(max_tokens=3))
    assert list(completion.token_ids) == runner.module.greedy(range(16), 3)
    counts = forward.manager.counters
    assert counts["step.none.too_many_tokens"] == 1
    assert counts["step.piecewise.best"] == 2


def test_nothing_stale_is_read() -> None:
    """All static buffers and all memory of the graphs are poisoned before each step."""
    engine, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE)
    prompts = prompts_of(4)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, SamplingParams(max_tokens=6), request_id=str(i))
    done = {}
    while engine.has_work:
        forward.manager.poison()
        done |= {u.request_id: list(u.completion.token_ids) for u in engine.step() if u.completion}
    assert done == {str(i): runner.module.greedy(prompt, 6) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("backend", [DeviceAttention, TorchReference])
def test_mixed_batches_run_in_one_full_graph_where_lengths_are_read_on_the_device(backend: type[AttentionBackend]) -> None:
    engine, runner, forward = make(ConfiguredMode.FULL, backend=backend)
    assert all(forward.manager.program(descriptor).num_graphs == 1 for descriptor in forward.manager.captured)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=8), request_id="early")
    engine.step()
    before = dict(forward.manager.counters)
    engine.add_request([8, 9, 10, 11, 12], SamplingParams(max_tokens=4), request_id="late")
    forward.manager.poison()
    engine.step()  # one decode beside a prompt of five
    counts = forward.manager.counters
    assert counts["step.full.best"] - before["step.full.best"] == 1
    done = {}
    while engine.has_work:
        forward.manager.poison()
        done |= {u.request_id: list(u.completion.token_ids) for u in engine.step() if u.completion}
    assert done == {"early": runner.module.greedy([5, 6, 7], 8), "late": runner.module.greedy([8, 9, 10, 11, 12], 4)}
    assert [name for name in counts if name.startswith("step.")] == ["step.full.best"]


def test_a_full_graph_of_mixed_batches_serves_one_whose_lengths_were_never_captured() -> None:
    engine, runner, forward = make(ConfiguredMode.FULL, backend=TorchReference)
    prompts = [[1], list(range(2, 15)), [20, 21], list(range(30, 37)), [40, 41, 42]]
    completions = engine.generate(prompts, SamplingParams(max_tokens=5))
    assert [list(c.token_ids) for c in completions] == [runner.module.greedy(prompt, 5) for prompt in prompts]
    assert {name for name in forward.manager.counters if name.startswith("step.")} == {"step.full.best"}


@pytest.mark.parametrize("backend", [DeviceAttention, TorchReference])
def test_three_tokens_a_request_run_in_a_full_graph_of_that_query_length(backend: type[AttentionBackend]) -> None:
    """As a step that checks drafts would: the batch of equal chunks is offered to the dispatcher as a uniform one."""
    _, runner, forward = make(ConfiguredMode.FULL_AND_PIECEWISE, backend=backend, query_lens=(1, 3))
    ids = {name: tuple(range(first, first + 6)) for name, first in (("a", 1), ("b", 11), ("c", 21))}
    requests = tuple(
        NewRequest(request_id=name, token_ids=tokens, prompt_len=6, block_ids=((2 * n + 1, 2 * n + 2),), sampling=SamplingParams())
        for n, (name, tokens) in enumerate(ids.items())
    )
    chunks = dict.fromkeys(ids, 3)
    runner.execute_model(StepPlan(new_requests=requests, num_scheduled_tokens=chunks))
    runner.sample_tokens()
    batch = replace(gather_batch(chunks, runner.slots), uniform_query_len=3)
    exactly = run_batch(runner, forward, batch, GraphMode.NONE)
    descriptor = forward.dispatch(batch).descriptor
    assert (descriptor.mode, descriptor.uniform_query_len, descriptor.num_requests) == (GraphMode.FULL, 3, 3)
    forward.manager.poison()
    torch.testing.assert_close(run_batch(runner, forward, batch, GraphMode.FULL), exactly)


def run_batch(runner: ModelRunner, forward: GraphForward, batch: Batch, best: GraphMode) -> torch.Tensor:
    """Hidden states of the batch's tokens; nothing is advanced."""
    with torch.no_grad():
        prepared = runner.prepare(batch, forward.dispatch(batch, best=best))
        rows = prepared.dispatch.num_tokens
        ids, positions = runner.buffers.input_ids[:rows], runner.buffers.positions[:rows]
        return forward.run(prepared.dispatch, ids, positions, prepared.context)[: batch.num_tokens].clone()
