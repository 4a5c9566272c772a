"""Bytes of graphs: counted, predicted from three sizes, kept within a budget, and given back."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rung.counters import Count
from rung.errors import CaptureError, ConfigError
from rung.graphs import (
    CaptureEntry,
    Descriptor,
    Dispatcher,
    GraphManager,
    GraphMode,
    Ladder,
    MemoryBudget,
    MemoryModel,
    Reason,
    Shape,
)
from rung.graphs.backends.base import NodeCounts
from rung.graphs.backends.recorded_memory import RECORD_BYTES
from rung.graphs.memory import probes
from rung.graphs.memory_budget import default_steps, trim
from tests.graphs.toys import both_modes, data, fresh_break_plan, make_manager, run_padded

LADDER = Ladder.up_to(64)
MIB = 2**20


def manager_of(limit_bytes: int | None = None) -> GraphManager:
    budget = None if limit_bytes is None else MemoryBudget(limit_bytes=limit_bytes)
    return make_manager(fresh_break_plan(), capacity=64, budget=budget)


def needed() -> int:
    """Bytes of all graphs of the ladder in both modes."""
    manager = manager_of()
    manager.capture(both_modes(LADDER))
    return manager.memory().total_bytes


def full(size: int) -> Descriptor:
    return Descriptor(mode=GraphMode.FULL, num_tokens=size)


def piecewise(size: int) -> Descriptor:
    return Descriptor(mode=GraphMode.PIECEWISE, num_tokens=size)


# --- accounting ---


def test_entries_have_nodes_and_executable_bytes() -> None:
    report = manager_of().capture([full(8), piecewise(8)])
    by_mode = {entry.descriptor.mode: entry for entry in report.entries}
    assert by_mode[GraphMode.PIECEWISE].nodes == NodeCounts(kernels=2)  # the break is not in a graph
    assert by_mode[GraphMode.FULL].num_graphs == 1
    for entry in report.entries:
        assert entry.num_nodes is not None
        assert entry.executable_bytes == entry.num_nodes * RECORD_BYTES


def test_entries_add_up_to_what_is_held() -> None:
    manager = manager_of()
    report = manager.capture(both_modes(LADDER))
    assert sum(entry.pool_bytes for entry in report.entries) == manager.pool_bytes
    assert report.memory is not None
    assert report.memory.total_bytes == sum(entry.pool_bytes + entry.executable_bytes for entry in report.entries)
    assert report.memory.buffer_bytes == 64 * 4 * 4


def test_seconds_are_split_into_phases() -> None:
    report = manager_of().capture([full(8)])
    assert set(report.phases) == {"prepare", "warm-up", "capture", "account"}
    assert sum(report.phases.values()) == pytest.approx(report.entries[0].seconds)


def test_report_as_json_holds_the_model() -> None:
    manager = manager_of()
    manager.capture(both_modes(LADDER))
    value = json.loads(json.dumps(manager.memory().as_json()))
    assert MemoryModel.from_json(value["model"]) == manager.memory_model
    assert value["entries"][0]["descriptor"] == "piecewise, 64 tokens"


# --- prediction ---


def test_probes_are_the_largest_middle_and_smallest_of_each_kind() -> None:
    assert [one.num_tokens for one in probes([full(n) for n in (1, 2, 4, 8, 16)])] == [1, 4, 16]
    assert set(probes([full(1), piecewise(1), piecewise(2)])) == {full(1), piecewise(1), piecewise(2)}


def test_prediction_from_six_captures_is_what_all_of_them_take() -> None:
    manager = manager_of()
    manager.capture(both_modes(LADDER))
    memory = manager.memory()
    assert memory.predicted is not None
    assert memory.predicted.pool_bytes == pytest.approx(memory.pool_bytes, rel=0.1)
    assert memory.predicted.executable_bytes == memory.executable_bytes
    assert memory.prediction_error == pytest.approx(0.0, abs=0.1)


def entry(descriptor: Descriptor, pool_mib: float, executable_mib: float, graphs: int, nodes: int) -> CaptureEntry:
    return CaptureEntry(descriptor, 0.0, int(pool_mib * MIB), graphs, int(executable_mib * MIB), NodeCounts(kernels=nodes))


def shared_pool_model() -> MemoryModel:
    """66 nodes in 33 graphs or in one; 0.125 MiB a graph, 0.0625 a node."""
    entries = [
        *(entry(piecewise(size), pool, 33 * 0.125 + 66 * 0.0625, 33, 66) for size, pool in ((512, 40), (128, 2), (1, 1))),
        *(entry(full(size), pool, 0.125 + 66 * 0.0625, 1, 66) for size, pool in ((256, 3), (64, 0), (1, 0))),
    ]
    return MemoryModel.fit(entries, shared_pool=True)


def test_a_graph_and_a_node_are_told_apart_by_the_two_modes() -> None:
    model = shared_pool_model()
    assert model.bytes_per_graph == pytest.approx(0.125 * MIB)
    assert model.bytes_per_node == pytest.approx(0.0625 * MIB)
    assert model.executable_bytes(piecewise(300)) == pytest.approx(8.25 * MIB)


def test_a_shared_pool_is_the_largest_size_and_what_smaller_ones_added() -> None:
    model = shared_pool_model()
    assert model.pool_bytes([piecewise(size) for size in (512, 256, 128, 8, 1)]) == 43 * MIB
    assert model.pool_bytes([piecewise(size) for size in (512, 256)]) == 40 * MIB
    assert model.pool_bytes([piecewise(size) for size in (256, 128)]) == 22 * MIB
    assert model.pool_bytes([piecewise(512), full(256)]) == 43 * MIB
    assert model.pool_bytes([]) == 0


def test_a_believed_cost_holds_until_captures_took_enough_to_tell() -> None:
    few = [entry(full(8), 1, 2, 1, 64), entry(full(1), 0, 2, 1, 64)]
    believed = MemoryModel.fit(few, shared_pool=True, executable_cost=(1000.0, 10.0))
    assert (believed.bytes_per_graph, believed.bytes_per_node) == (1000.0, 10.0)
    many = [replace(one, executable_bytes=64 * MIB) for one in few]
    assert MemoryModel.fit(many, shared_pool=True, executable_cost=(1000.0, 10.0)).predict([full(8)]).executable_bytes == 64 * MIB


def test_one_kind_gives_all_bytes_to_its_nodes_and_none_to_graphs() -> None:
    model = MemoryModel.fit([entry(full(8), 1, 2, 1, 64)], shared_pool=True)
    assert (model.bytes_per_graph, model.bytes_per_node) == (0.0, 2 * MIB / 64)


def test_without_node_counts_every_graph_counts_alike() -> None:
    model = MemoryModel.fit([CaptureEntry(piecewise(8), 0.0, 0, 4, 4 * MIB)], shared_pool=True)
    assert model.executable_bytes(piecewise(2)) == 4 * MIB


@pytest.mark.parametrize("value", [{}, [], {"format": "rung.graph_memory", "version": 2, "samples": []}, None])
def test_other_json_is_no_model(value: object) -> None:
    with pytest.raises(ConfigError, match="no memory model"):
        MemoryModel.from_json(value)


# --- trimming ---


def trimmed_sizes(sizes: Sequence[int], executables: int, steps: dict[Shape, float] | None = None) -> list[int]:
    """What is left out of `sizes` when so many executables fit, in order."""
    model = MemoryModel.fit([entry(full(max(sizes)), 0, 1, 1, 16)], shared_pool=True)
    limit = MemoryBudget(limit_bytes=executables * MIB, steps=steps, max_waste=None)
    return [one.num_tokens for one in trim([full(size) for size in sizes], model, limit)]


def test_a_list_that_fits_is_left_alone() -> None:
    assert trimmed_sizes([1, 2, 4, 8], 4) == []


def test_the_top_is_kept_longest_by_default() -> None:
    sizes = [1, 2, 4, *range(8, 65, 8)]
    dropped = trimmed_sizes(sizes, 1)
    assert len(dropped) == len(sizes) - 1
    assert 64 not in dropped


def test_sizes_that_the_trace_does_not_use_go_first() -> None:
    steps = {Shape(num_tokens=3): 10.0, Shape(num_tokens=30): 1.0}
    assert set(trimmed_sizes([1, 2, 4, 8, 16, 32], 2, steps)) == {1, 2, 8, 16}
    assert set(trimmed_sizes([1, 2, 4, 8, 16, 32], 1, steps)) == {1, 2, 4, 8, 16}  # 32 serves both


def test_default_steps_fill_each_descriptor() -> None:
    steps = default_steps([full(1), full(4)])
    assert sum(steps.values()) == pytest.approx(1.0)
    assert steps[Shape(num_tokens=4, max_query_len=4)] > 0.5


# --- budget ---


def test_a_budget_that_suffices_trims_nothing() -> None:
    manager = manager_of(int(needed() * 1.1))
    assert len(manager.capture(both_modes(LADDER)).entries) == 2 * len(LADDER.sizes)
    assert not manager.trimmed


@pytest.mark.parametrize("share", [0.7, 0.3, 0.05])
def test_over_a_small_budget_sizes_are_trimmed_with_a_log_and_the_others_work(share: float, caplog: pytest.LogCaptureFixture) -> None:
    limit = int(needed() * share)
    manager = manager_of(limit)
    descriptors = both_modes(LADDER)
    with caplog.at_level(logging.WARNING, "rung"):
        report = manager.capture(descriptors)
    assert "to stay within" in caplog.text
    assert manager.memory().total_bytes <= limit
    assert set(manager.captured) | set(manager.trimmed) == set(descriptors)
    assert manager.captured
    assert manager.trimmed
    assert report.entries == manager.memory().entries
    plan = fresh_break_plan()
    for descriptor in manager.captured:
        x = data(descriptor.num_tokens, 3)
        assert torch.equal(run_padded(manager, descriptor, x)[0], plan(x)[0])


def test_nothing_fits_and_nothing_is_captured() -> None:
    manager = manager_of(0)
    assert manager.capture(both_modes(LADDER)).entries == ()
    assert manager.memory().total_bytes == 0


def test_a_model_from_before_trims_without_a_probe() -> None:
    first = manager_of()
    first.capture(both_modes(LADDER))
    manager = manager_of(needed() // 2)
    manager.capture(both_modes(LADDER), model=first.memory_model)
    assert manager.trimmed
    assert manager.counters[Count.CAPTURES] == manager.num_captured  # nothing was captured in vain


def test_a_trimmed_size_is_the_reason_of_a_step_without_a_graph() -> None:
    manager = manager_of(0)
    descriptors = [full(4)]
    dispatcher = Dispatcher(descriptors, failed=manager.failed, trimmed=manager.trimmed)
    manager.capture(descriptors)
    dispatch = dispatcher.dispatch(Shape(num_tokens=3))
    assert (dispatch.descriptor.mode, dispatch.reason) == (GraphMode.NONE, Reason.MEMORY_BUDGET)


def test_a_lazy_capture_over_the_budget_is_refused_once_and_for_all() -> None:
    manager = manager_of(0)
    manager.capture([full(4)], lazy=True)
    with pytest.raises(CaptureError, match="does not fit the memory budget"):
        manager.run(full(4))
    assert full(4) in manager.failed
    assert not manager.captured


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        MemoryBudget(limit_bytes=-1)


# --- life ---


def test_five_rounds_of_capture_and_release_return_to_nothing() -> None:
    manager = manager_of(needed() // 2)
    took = set()
    for _ in range(5):
        manager.capture(both_modes(LADDER))
        took.add(manager.memory().total_bytes)
        manager.release()
        assert (manager.memory().total_bytes, manager.memory().entries, len(manager.trimmed), len(manager.failed)) == (0, (), 0, 0)
    assert len(took) == 1
