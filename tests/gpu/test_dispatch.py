"""FULL graphs of mixed batches, decodes of several tokens, and joined captures on CUDA, with the Triton attention backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import rung
from rung.graphs import Descriptor, GraphMode
from rung.graphs.program import GraphLaunch, PreboundBreak
from rung.models import random_model
from rung.runner import Engine, ModelRunner, NewRequest, RunnerConfig, SamplingParams, StepPlan, build_engine
from rung.runner.batch import Batch, gather_batch
from rung.runner.config import Mode
from rung.runner.graph_forward import GraphForward
from tests.compile.cases import HOST_FACTOR, double

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RELATIVE_ERROR = 1e-4  # float32: kernels and their order of sums differ between sizes
LENGTHS = (1, 70, 5, 33, 2, 64, 17, 3)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def built(graphs: Mode) -> tuple[Engine, ModelRunner, GraphForward]:
    module = random_model("tiny", dtype=torch.float32, device="cuda", seed=1)
    config = RunnerConfig(
        max_num_requests=8,
        max_num_tokens=256,
        max_model_len=256,
        num_blocks=8 * 16 + 1,
        graphs=graphs,
        decode_query_lens=(1, 4),
        capture_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        attention_backend="triton_paged",
    )
    engine, runner, start = build_engine(module, config)
    print(graphs, start.attention, start.capture and len(start.capture.entries))
    forward = runner.forward
    assert isinstance(forward, GraphForward)
    return engine, runner, forward


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


def texts(graphs: Mode) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Greedy tokens of requests that come one after the other, so that prompts run beside decodes; and the steps by mode and reason."""
    engine, _, forward = built(graphs)
    before = dict(forward.manager.counters)
    waiting, done = [*enumerate(prompts())], {}
    while waiting or engine.has_work:
        if waiting:
            index, prompt = waiting.pop(0)
            engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), request_id=str(index))
        if graphs != "none":
            forward.manager.poison(torch.Generator(device="cuda").manual_seed(len(waiting)))
        done |= {update.request_id: update.completion.token_ids for update in engine.step() if update.completion}
    counts = {name: n - before.get(name, 0) for name, n in forward.manager.counters.items() if name.startswith("step.")}
    return [done[str(index)] for index in range(len(LENGTHS))], {name: n for name, n in counts.items() if n}


def test_mixed_batches_run_in_one_full_graph_and_give_the_same_tokens() -> None:
    wanted, _ = texts("none")
    found, counts = texts("full")
    print(counts)
    assert found == wanted
    assert set(counts) == {"step.full.best"}
    manager = built("full")[2].manager
    assert {manager.program(descriptor).num_graphs for descriptor in manager.captured} == {1}
    assert any(descriptor.uniform_query_len is None for descriptor in manager.captured)


def test_full_and_piecewise_give_the_same_tokens() -> None:
    wanted, _ = texts("none")
    found, counts = texts("full_and_piecewise")
    assert found == wanted
    assert set(counts) == {"step.full.best", "step.piecewise.mixed_batch"}


def test_piecewise_steps_write_the_cache_inside_the_graph_before_attention() -> None:
    program = built("full_and_piecewise")[2].manager.program(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=16))
    assert [type(action) for action in program.actions] == [GraphLaunch, PreboundBreak] * 3 + [GraphLaunch]
    assert all(action.name.endswith(".1") for action in program.actions if isinstance(action, PreboundBreak))


def hidden(batch: Batch, best: GraphMode) -> tuple[torch.Tensor, Descriptor]:
    _, runner, forward = built("full_and_piecewise")
    dispatch = forward.dispatch(batch, best=best)
    forward.manager.poison(torch.Generator(device="cuda").manual_seed(1))
    prepared = runner.prepare(batch, dispatch)
    rows = dispatch.num_tokens
    out = forward.run(dispatch, runner.buffers.input_ids[:rows], runner.buffers.positions[:rows], prepared.context)
    return out[: batch.num_tokens].clone(), dispatch.descriptor


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_four_tokens_a_request_run_in_a_full_graph_of_that_query_length(count: int) -> None:
    _, runner, _ = built("full_and_piecewise")
    names = [f"four-{count}-{index}" for index in range(count)]
    requests = tuple(
        NewRequest(
            request_id=name,
            token_ids=tuple(range(10 * index, 10 * index + 40)),
            prompt_len=40,
            block_ids=(tuple(range(1 + 3 * index, 4 + 3 * index)),),
            sampling=SamplingParams(temperature=0.0),
        )
        for index, name in enumerate(names)
    )
    runner.execute_model(StepPlan(new_requests=requests, num_scheduled_tokens=dict.fromkeys(names, 20)))
    runner.sample_tokens()
    batch = replace(gather_batch(dict.fromkeys(names, 4), runner.slots), uniform_query_len=4)
    wanted, _ = hidden(batch, GraphMode.NONE)
    found, descriptor = hidden(batch, GraphMode.FULL)
    runner.execute_model(StepPlan(finished_request_ids=frozenset(names)))
    assert (descriptor.mode, descriptor.uniform_query_len) == (GraphMode.FULL, 4)
    assert float((found - wanted).norm() / wanted.norm()) < RELATIVE_ERROR


def test_a_break_that_decides_on_the_host_cuts_a_full_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: torch.Tensor) -> Any:
        return double(torch.ops.rungtest.host_scale(double(x + 1)) - 1) + 2

    ops = ("rungtest::double", "rungtest::host_scale")
    compiled = rung.wrap(forward, dynamic={"x": {0: "rows"}}, split_ops=ops, graphs="full")
    for factor in (2.0, 5.0):
        monkeypatch.setitem(HOST_FACTOR, "factor", factor)
        x = torch.randn(16, 8, device="cuda")
        torch.testing.assert_close(compiled(x), (double(x + 1) * factor - 1) * 2 + 2)
    assert {name: n for name, n in compiled.rung.counters.items() if name.startswith("step.")} == {"step.full.host_break": 2}
