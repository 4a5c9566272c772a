"""Suspend, resume, recapture, release; threads; ranges; what a wrapped module offers of it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rung.counters import Count
from rung.errors import CaptureError, ConfigError, StaleOutputError, StateError
from rung.graphs import Descriptor, GraphManager, GraphMode, Ladder, read_trace
from rung.graphs.ranges import Ranges
from rung.graphs.wrapped import WrappedGraphs
from tests.graphs.test_manager import FULL_4, PIECEWISE_4, PIECEWISE_8, Unhappy, unhappy_plan
from tests.graphs.test_wrapped import graphed, steps, twice
from tests.graphs.toys import both_modes, brk, data, fresh_break_plan, make_manager, only, piece, run_padded

LADDER = Ladder.custom([1, 2, 4, 8, 16])


def held_bytes() -> int:
    """Bytes of all living tensors, each storage once."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


# --- a manager -----------------------------------------------------------------------------------------------------------------------


def test_suspended_graphs_hold_no_memory_and_come_back_with_the_same_list() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan)
    manager.capture(both_modes(LADDER))
    captured, held = manager.captured, manager.pool_bytes
    manager.suspend()
    assert (manager.is_suspended, manager.captured, manager.pool_bytes) == (True, (), 0)
    report = manager.resume()
    assert (manager.is_suspended, manager.captured, manager.pool_bytes) == (False, captured, held)
    assert [entry.descriptor for entry in report.entries] == list(captured)
    for seed, descriptor in enumerate(captured):
        x = data(descriptor.num_tokens, seed)
        manager.poison()
        assert torch.equal(run_padded(manager, descriptor, x)[0], plan(x)[0])


def test_suspending_twice_keeps_the_first_list() -> None:
    manager = make_manager(fresh_break_plan())
    manager.capture([FULL_4])
    manager.suspend()
    manager.suspend()
    assert [entry.descriptor for entry in manager.resume().entries] == [FULL_4]


def test_step_of_a_suspended_graph_is_refused() -> None:
    manager = make_manager(fresh_break_plan())
    manager.capture([FULL_4])
    manager.suspend()
    with pytest.raises(StateError, match="suspended"):
        manager.run(FULL_4)
    with pytest.raises(StateError, match="suspended"):
        manager.capture([PIECEWISE_4])


def test_outputs_are_stale_after_suspending() -> None:
    manager = make_manager(fresh_break_plan())
    manager.capture([FULL_4])
    outputs = manager.run(FULL_4)
    manager.suspend()
    with pytest.raises(StaleOutputError):
        outputs.borrow()


def test_each_descriptor_is_prepared_again_as_at_first() -> None:
    entered: list[tuple[str, Descriptor]] = []

    def prepare(name: str) -> Callable[[Descriptor], Any]:
        @contextmanager
        def enter(descriptor: Descriptor) -> Iterator[None]:
            entered.append((name, descriptor))
            yield

        return enter

    manager = make_manager(fresh_break_plan())
    manager.capture([FULL_4], prepare("a"))
    manager.capture([PIECEWISE_4], prepare("b"))
    entered.clear()
    manager.recapture()
    assert entered == [("b", PIECEWISE_4), ("a", FULL_4)]


def test_recapture_reads_addresses_that_changed() -> None:
    held = [torch.ones(4)]
    manager = make_manager(only(piece("piece_00", lambda x: (x * held[0],))))
    manager.capture([FULL_4])
    held[0] = torch.full((4,), 3.0)
    x = data(4, 1)
    manager.recapture()
    assert torch.equal(run_padded(manager, FULL_4, x)[0], x * 3)


def test_failure_while_resuming_names_the_size_and_leaves_the_rest_usable() -> None:
    failure = Unhappy(4, 4)  # 2 calls by the first capture, then a warm-up, then the second capture
    plan = unhappy_plan(failure)
    manager = make_manager(plan)
    manager.capture([PIECEWISE_8, PIECEWISE_4])
    manager.suspend()
    with pytest.raises(CaptureError, match="4 tokens"):
        manager.resume()
    assert (manager.captured, manager.failed) == ((PIECEWISE_8,), {PIECEWISE_4})
    x = data(8, 1)
    assert torch.equal(run_padded(manager, PIECEWISE_8, x)[0], plan(x)[0])


@pytest.fixture
def _only_new_objects() -> Iterator[None]:
    """Objects from before are not looked at: in a process of many tests that takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_new_objects")
@pytest.mark.parametrize("close", [GraphManager.release, GraphManager.suspend])
def test_five_rounds_return_to_the_starting_bytes(close: Callable[[GraphManager], None]) -> None:
    plan = fresh_break_plan()
    start = held_bytes()
    rounds = []
    for _ in range(5):
        manager = make_manager(plan)
        manager.capture(both_modes(LADDER))
        run_padded(manager, FULL_4, data(4, 1))
        assert held_bytes() > start
        close(manager)
        assert held_bytes() == start + sum(buffer.nbytes for buffer in manager.inputs)
        del manager
        rounds.append(held_bytes())
    assert rounds == [start] * 5


def test_ranges_are_nested_by_replay_and_action_and_absent_otherwise() -> None:
    seen: list[str] = []
    ranges = Ranges(push=seen.append, pop=lambda: seen.append("end"))
    manager = make_manager(fresh_break_plan(), ranges=ranges)
    manager.capture([PIECEWISE_4])
    seen.clear()
    manager.run(PIECEWISE_4)
    actions = ["graph piece_00", "end", "break break_01", "end", "graph piece_02", "end"]
    assert seen == ["replay (piecewise, 4 tokens)", *actions, "end"]
    seen.clear()
    manager.run(Descriptor(mode=GraphMode.NONE, num_tokens=4))
    assert seen == ["piece_00", "end", "break_01", "end", "piece_02", "end"]
    plain = make_manager(fresh_break_plan())
    plain.capture([PIECEWISE_4])
    assert [run.__name__ for run in plain.program(PIECEWISE_4)._runs] == ["replay", "run", "replay"]  # nothing is wrapped


def test_a_range_ends_when_its_step_raises() -> None:
    armed = [False]

    def call(x: torch.Tensor) -> tuple[torch.Tensor]:
        if armed[0]:
            raise ValueError("no")
        return (x + 1,)

    depth = [0]
    ranges = Ranges(push=lambda name: depth.__setitem__(0, depth[0] + 1), pop=lambda: depth.__setitem__(0, depth[0] - 1))
    manager = make_manager(only(brk("break_00", call)), ranges=ranges)
    manager.capture([PIECEWISE_4])
    armed[0] = True
    with pytest.raises(ValueError, match="no"):
        manager.run(PIECEWISE_4)
    assert depth == [0]


# --- a wrapped module ----------------------------------------------------------------------------------------------------------------


def test_wrapped_calls_run_without_graphs_while_suspended_and_say_so() -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), maximum=16)
    x = torch.randn(3, 4)
    target(x)
    target.suspend()
    torch.testing.assert_close(target(x), twice(x))
    assert target._manager is not None
    assert target._manager.pool_bytes == 0
    target.resume()
    torch.testing.assert_close(target(x), twice(x))
    assert steps(target) == {"step.full.best": 2, "step.none.suspended": 1}
    assert target.counters[Count.CAPTURES] == 2


def test_a_size_is_captured_once_it_was_seen_often_enough() -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), maximum=16, capture_after=3)
    for rows in (3, 4, 5, 3, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(target(x), twice(x))
    assert steps(target) == {"step.none.capture_pending": 3, "step.full.best": 2}
    assert target.counters[Count.CAPTURES] == 1


def test_the_last_step_is_explained_and_every_step_is_a_line(tmp_path: Path) -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), maximum=16, capture_sizes=(4,), step_trace=tmp_path / "steps.jsonl")
    for rows in (3, 3, 9):
        target(torch.randn(rows, 4))
    assert target.last is not None
    assert (target.last.descriptor.mode, target.last.reason) == ("none", "too_many_tokens")
    assert target.log is not None
    target.log.flush()
    (run,) = read_trace(tmp_path / "steps.jsonl")
    assert [(step.shape.num_tokens, step.mode, step.padded, step.reason, step.count) for step in run.steps] == [
        (3, "full", 4, "best", 2),
        (9, "none", 9, "too_many_tokens", 1),
    ]
    assert run.header.ladder == (4,)
    assert json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])["graphs"] == "full"


def test_nvtx_without_a_cuda_build_is_refused() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has NVTX")
    with pytest.raises(ConfigError, match="NVTX"):
        graphed(twice, torch.randn(3, 4), nvtx=True)


def test_two_threads_call_one_module_and_each_gets_its_own_outputs() -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), maximum=16)
    assert _wrong_calls(target, threads=2, calls=60) == []


def _wrong_calls(target: WrappedGraphs, *, threads: int, calls: int) -> list[int]:
    """Rows of the calls whose outputs were not theirs; every thread keeps its outputs until the end."""
    start, wrong = threading.Barrier(threads), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        kept = []
        for call in range(calls):
            x = torch.randn(1 + (seed + call) % 9, 4, generator=generator)
            kept.append((x, target(x)))
        wrong.extend(x.shape[0] for x, y in kept if not torch.equal(y, twice(x)))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return wrong
