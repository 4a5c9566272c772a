"""Capture and replay through the recorded backend: equality with eager, orders, failures, outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rung.compile.bound import BoundStep
from rung.counters import Count
from rung.errors import AddressChangedError, CaptureError, StaleOutputError
from rung.graphs import (
    BufferSpec,
    Descriptor,
    Dispatch,
    Dispatcher,
    GraphManager,
    GraphMode,
    Ladder,
    Reason,
    Shape,
    StaticBuffer,
    make_backend,
)
from rung.graphs.descriptor import ConfiguredMode
from rung.graphs.guard import Addresses, module_tensors
from rung.graphs.planned import plan_descriptors
from tests.graphs.toys import (
    PLANS,
    ToyPlan,
    both_modes,
    brk,
    data,
    fresh_break_plan,
    make_buffers,
    make_manager,
    only,
    out_break_plan,
    piece,
    run_padded,
)

LADDER = Ladder.custom([1, 2, 4, 8, 16])
FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)
PIECEWISE_4 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)
PIECEWISE_8 = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=8)


def assert_equals_eager(plan: ToyPlan, descriptor: Descriptor, got: list[Any], x: torch.Tensor) -> None:
    want = list(plan(x))
    for mine, reference in zip(got, want, strict=True):
        if isinstance(reference, torch.Tensor):
            assert torch.equal(mine, reference)
        else:
            assert mine == descriptor.num_tokens  # the size itself


def prefix_plan(name: str) -> ToyPlan:
    """The plan by name; none of its outputs depends on rows behind a row."""
    return PLANS[name]()


@pytest.mark.parametrize("name", [name for name in PLANS if name != "edges"])
def test_every_size_in_both_modes_equals_eager_on_new_inputs(name: str) -> None:
    plan = prefix_plan(name)
    manager = make_manager(plan)
    manager.capture(both_modes(LADDER))
    for seed, descriptor in enumerate(both_modes(LADDER) * 2):
        x = data(max(1, descriptor.num_tokens - seed % 3), seed)
        manager.poison()
        assert_equals_eager(plan, descriptor, run_padded(manager, descriptor, x), x)


@pytest.mark.parametrize("descriptor", [PIECEWISE_8, Descriptor(mode=GraphMode.FULL, num_tokens=8)])
def test_breaks_at_the_edges_and_values_handed_through(descriptor: Descriptor) -> None:
    plan = PLANS["edges"]()
    manager = make_manager(plan)
    manager.capture([descriptor])
    for seed in range(3):
        x = data(8, seed)
        assert_equals_eager(plan, descriptor, run_padded(manager, descriptor, x), x)


def test_piecewise_launches_one_graph_a_piece_and_full_one_in_all() -> None:
    manager = make_manager(PLANS["tuple"]())
    manager.capture([PIECEWISE_4, FULL_4])
    assert manager.program(PIECEWISE_4).num_graphs == 3
    assert manager.program(FULL_4).num_graphs == 1
    assert [type(action).__name__ for action in manager.program(PIECEWISE_4).actions] == [
        "GraphLaunch", "PreboundBreak", "GraphLaunch", "PreboundBreak", "GraphLaunch",
    ]  # fmt: skip


def test_pieces_are_not_called_by_a_replay_of_full_breaks_python() -> None:
    """Under FULL a replay enters no Python of the break."""
    calls: list[int] = []

    def counted(x: torch.Tensor) -> Sequence[Any]:
        calls.append(1)
        return (x + 1,)

    manager = make_manager(only(brk("break_00", counted)))
    manager.capture([FULL_4])
    captured = len(calls)
    run_padded(manager, FULL_4, data(4, 0))
    assert len(calls) == captured


def test_host_value_of_a_break_is_stale_in_full_and_fresh_in_piecewise() -> None:
    factor = [2.0]
    manager = make_manager(only(brk("break_00", lambda x: (x * factor[0],))))
    manager.capture([PIECEWISE_4, FULL_4])
    factor[0] = 5.0
    x = data(4, 1)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], x * 2)
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], x * 5)


def test_poisoned_padding_does_not_leak() -> None:
    """T15: rows behind the step's own hold the pad value, also after larger steps and poison."""

    def scale(x: torch.Tensor) -> Sequence[Any]:
        return (x / (1 + x.abs().amax()),)

    manager = make_manager(only(piece("piece_00", scale)), capacity=64)
    descriptors = plan_descriptors(Ladder.custom([1, 4, 64]), ConfiguredMode.FULL)
    manager.capture(descriptors)
    dispatcher = Dispatcher(descriptors)
    for rows in (64, 3, 1):
        manager.poison()
        x = data(rows, rows)
        got = run_padded(manager, dispatcher.dispatch(Shape(num_tokens=rows)).descriptor, x)[0]
        assert torch.equal(got, scale(x)[0])


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_capture_order_does_not_change_outputs(order: str) -> None:
    plan = fresh_break_plan()
    descriptors = list(both_modes(LADDER))
    descriptors.sort(key=lambda d: d.num_tokens, reverse=order == "descending")
    if order == "shuffled":
        descriptors = descriptors[1::2] + descriptors[::2]
    manager = make_manager(plan)
    report = manager.capture(descriptors, order="given")
    assert [entry.descriptor for entry in report.entries] == descriptors
    for descriptor in descriptors:
        x = data(descriptor.num_tokens, 7)
        assert torch.equal(run_padded(manager, descriptor, x)[0], plan(x)[0])


def test_probes_then_the_rest_piecewise_and_largest_first_by_default() -> None:
    report = make_manager(fresh_break_plan()).capture(reversed(both_modes(LADDER)))
    assert [(e.descriptor.mode.value, e.descriptor.num_tokens) for e in report.entries] == [
        *[("piecewise", size) for size in (16, 4, 1)],
        *[("full", size) for size in (16, 4, 1)],
        *[("piecewise", size) for size in (8, 2)],
        *[("full", size) for size in (8, 2)],
    ]


def test_report_has_seconds_and_bytes() -> None:
    report = make_manager(fresh_break_plan()).capture([PIECEWISE_8])
    assert report.pool_bytes == report.entries[0].pool_bytes == 2 * 8 * 4 * 4
    assert 0 < report.entries[0].seconds <= report.seconds


def test_size_above_the_top_runs_the_plan_and_is_counted() -> None:
    """T21."""
    plan = fresh_break_plan()
    manager = make_manager(plan, capacity=200)
    descriptors = plan_descriptors(LADDER, ConfiguredMode.PIECEWISE)
    manager.capture(descriptors)
    for rows in (17, 160):
        dispatch = Dispatcher(descriptors).dispatch(Shape(num_tokens=rows))
        x = data(rows, 3)
        manager.inputs[0].write(x, {"tokens": rows})
        with manager.counters.expect(**{"step.none.too_many_tokens": 1, Count.REPLAYS: 0}):
            outputs = manager.run(dispatch)
        assert torch.equal(outputs.borrow()[0], plan(x)[0])


def test_steps_are_counted_by_mode_and_reason() -> None:
    manager = make_manager(fresh_break_plan())
    manager.capture([FULL_4])
    with manager.counters.expect(**{"step.full.best": 1, "step.full.forced": 1, Count.REPLAYS: 2}):
        manager.run(FULL_4)
        manager.run(Dispatch(FULL_4, Reason.FORCED))
    assert manager.counters[Count.CAPTURES] == 1


def test_clone_survives_and_borrow_turns_stale() -> None:
    """T29."""
    plan = fresh_break_plan()
    manager = make_manager(plan)
    manager.capture([FULL_4, PIECEWISE_4])
    a, b = data(4, 1), data(4, 2)
    manager.inputs[0].write(a, {"tokens": 4})
    first = manager.run(FULL_4)
    kept = first.clone()
    assert torch.equal(first.borrow()[0], plan(a)[0])
    manager.inputs[0].write(b, {"tokens": 4})
    manager.run(PIECEWISE_4)
    assert torch.equal(kept[0], plan(a)[0])
    with pytest.raises(StaleOutputError, match="step 2"):
        first.borrow()


def test_into_copies_rows_to_the_caller() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan)
    manager.capture([FULL_4])
    x, target = data(3, 1), torch.zeros(3, 4)
    manager.inputs[0].write(x, {"tokens": 4})
    manager.run(FULL_4).into([target], 3)
    assert torch.equal(target, plan(x)[0])


def test_output_that_is_an_input_is_the_callers_after_clone() -> None:
    manager = make_manager(only(piece("piece_00", lambda x: (x,))))
    manager.capture([FULL_4])
    x = data(4, 1)
    got = run_padded(manager, FULL_4, x)[0]
    manager.inputs[0].write(data(4, 2), {"tokens": 4})
    assert torch.equal(got, x)


class Unhappy:
    """A break that fails at one size, when armed."""

    def __init__(self, size: int, only_in_call: int) -> None:
        self.size, self.only_in_call, self.calls = size, only_in_call, 0

    def __call__(self, q: torch.Tensor) -> Sequence[Any]:
        if q.shape[0] == self.size:
            self.calls += 1
            if self.calls == self.only_in_call:
                raise ValueError("out of luck")
        return (q.relu() + 1,)


def unhappy_plan(failure: Unhappy) -> ToyPlan:
    plan = fresh_break_plan()
    return ToyPlan([plan.walk[0], (brk("break_01", failure), ("q",), ("r",)), plan.walk[2]], plan.results)


@pytest.mark.parametrize(("call", "during"), [(1, "warm-up"), (2, "capture")])
def test_failure_in_the_middle_names_size_and_step_and_spares_the_rest(call: int, during: str) -> None:
    """T67."""
    plan = unhappy_plan(Unhappy(4, call))
    manager = make_manager(plan)
    descriptors = plan_descriptors(LADDER, ConfiguredMode.PIECEWISE)
    with pytest.raises(CaptureError, match=f"{during} of .*4 tokens.*break_01: ValueError: out of luck") as error:
        manager.capture(descriptors)
    assert (error.value.size, error.value.piece, type(error.value.__cause__)) == (4, "break_01", ValueError)
    assert manager.failed == {PIECEWISE_4}
    dispatcher = Dispatcher(descriptors, failed=manager.failed)
    for rows in (16, 7, 4, 2, 1):
        x = data(rows, rows)
        assert torch.equal(run_padded(manager, dispatcher.dispatch(Shape(num_tokens=rows)).descriptor, x)[0], plan(x)[0])


def test_failed_size_runs_when_captured_again() -> None:
    plan = unhappy_plan(Unhappy(4, 2))
    manager = make_manager(plan)
    report = manager.capture([PIECEWISE_8, PIECEWISE_4], on_failure="skip")
    assert [failure.size for failure in report.failures] == [4]
    manager.capture([PIECEWISE_4])
    x = data(4, 0)
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], plan(x)[0])


def test_failed_capture_gives_its_memory_back() -> None:
    manager = make_manager(unhappy_plan(Unhappy(4, 2)))
    manager.capture([PIECEWISE_8])
    before = manager.pool_bytes
    report = manager.capture([Descriptor(mode=GraphMode.FULL, num_tokens=4)], on_failure="skip")
    assert len(report.failures) == 1
    assert manager.pool_bytes == before


def test_running_what_was_never_captured_is_an_error() -> None:
    with pytest.raises(CaptureError, match="no graph was captured for \\(full, 4 tokens\\)"):
        make_manager(fresh_break_plan()).run(FULL_4)


def test_lazy_descriptor_is_captured_once_and_keeps_the_steps_inputs() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan)

    @contextmanager
    def prepare(descriptor: Descriptor) -> Iterator[None]:
        manager.inputs[0].poison()
        yield

    manager.capture([FULL_4], prepare, lazy=True)
    assert not manager.can_replay(FULL_4)
    for seed in range(2):
        x = data(4, seed)
        assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])
    assert manager.counters[Count.CAPTURES] == 1


def test_prepare_is_entered_once_for_warm_up_and_capture() -> None:
    entered: list[Descriptor] = []

    @contextmanager
    def prepare(descriptor: Descriptor) -> Iterator[None]:
        entered.append(descriptor)
        yield

    make_manager(fresh_break_plan()).capture([FULL_4, PIECEWISE_4], prepare)
    assert entered == [PIECEWISE_4, FULL_4]


def test_later_sizes_warm_up_shared_code_once() -> None:
    """Four pieces of one code and a break between each two; the replays are right at every size."""
    ran: list[int] = []

    def body(x: torch.Tensor) -> Sequence[Any]:
        ran.append(x.shape[0])
        return (x + 1,)

    shared = piece("piece_00", body).call
    steps: list[tuple[BoundStep, tuple[str, ...], tuple[str, ...]]] = []
    for index in range(4):
        steps.append((BoundStep("piece", f"piece_{index}", shared), (f"v{2 * index}" if index else "x",), (f"v{2 * index + 1}",)))
        steps.append((brk(f"break_{index}", lambda x: (x * 2,)), (f"v{2 * index + 1}",), (f"v{2 * index + 2}",)))
    plan = ToyPlan(steps, ("v8",))
    manager = make_manager(plan, watch_all=False)
    sizes = [Descriptor(mode=GraphMode.PIECEWISE, num_tokens=size) for size in (16, 8, 4)]
    manager.capture(sizes)
    assert [ran.count(size) for size in (16, 8, 4)] == [8, 5, 5]  # a warm-up and a capture
    for descriptor in sizes:
        x = data(descriptor.num_tokens, 0)
        assert torch.equal(run_padded(manager, descriptor, x)[0], plan(x)[0])
    ran.clear()
    make_manager(plan).capture(sizes)
    assert [ran.count(size) for size in (16, 8, 4)] == [8, 8, 8]


def _look_up(places: Sequence[int], breaks: Sequence[Callable[..., Sequence[Any]]]) -> ToyPlan:
    """Pieces of one code, each given its place, which they make a tensor of; what they make is for a break of their own."""
    shared = piece("piece", lambda x, place: (x + 1, torch.full((x.shape[0],), place))).call
    steps = [(brk("places", lambda x: places), ("x",), tuple(f"place{index}" for index in range(len(places))))]
    for index, call in enumerate(breaks):
        needs = (f"x{index}" if index else "x", f"place{index}")
        steps.append((BoundStep("piece", f"piece_{index}", shared), needs, (f"y{index}", f"at{index}")))
        steps.append((brk(f"break_{index}", call), (f"y{index}", f"at{index}"), (f"x{index + 1}",)))
    return ToyPlan(steps, (f"x{len(breaks)}",))


def _in_table(rows: int, shift: int) -> Callable[..., Sequence[Any]]:
    def call(y: torch.Tensor, at: torch.Tensor) -> Sequence[Any]:
        if shift:
            at += shift
        return (torch.arange(1.0, 1.0 + rows)[at].unsqueeze(1) * y,)

    return call


@pytest.mark.parametrize(
    "plan",
    [_look_up((0, 0, 0), [_in_table(3, 2)] * 3), _look_up((1, 0, 0), [_in_table(2, 0), _in_table(1, 0), _in_table(1, 0)])],
    ids=["updated in place", "tables of other sizes"],
)
def test_later_sizes_are_captured_where_breaks_need_what_their_own_piece_made(plan: ToyPlan) -> None:
    """Places in a table, which those of the first piece are not for every break."""
    manager = make_manager(plan, watch_all=False)
    sizes = [Descriptor(mode=GraphMode.PIECEWISE, num_tokens=size) for size in (16, 8)]
    assert not manager.capture(sizes).failures
    for descriptor in sizes:
        x = data(descriptor.num_tokens, 0)
        assert torch.equal(run_padded(manager, descriptor, x)[0], plan(x)[0])


def test_break_whose_results_change_shape_is_refused() -> None:
    rows = [4]
    manager = make_manager(only(brk("break_00", lambda x: (x[: rows[0]].clone(),))))
    manager.capture([PIECEWISE_4])
    rows[0] = 2
    with pytest.raises(CaptureError, match=r"break_00.*\[4, 4\].*\[2, 4\]"):
        manager.run(PIECEWISE_4)


def test_break_that_returns_its_own_buffer_is_not_copied() -> None:
    buffer = torch.zeros(4, 4)

    def into_buffer(x: torch.Tensor) -> Sequence[Any]:
        return (buffer.copy_(x),)

    manager = make_manager(only(brk("break_00", into_buffer)))
    manager.capture([PIECEWISE_4])
    x = data(4, 1)
    assert manager.program(PIECEWISE_4).outputs[0].data_ptr() == buffer.data_ptr()
    assert torch.equal(run_padded(manager, PIECEWISE_4, x)[0], x)


@pytest.mark.parametrize("change", ["data", "parameter", "buffer"])
def test_moved_weights_are_named(change: str) -> None:
    """T34: new values in place are fine and seen; another address is an error."""
    module = torch.nn.Linear(4, 4)
    module.register_buffer("scale", torch.ones(4))
    plan = only(piece("piece_00", lambda x: (torch.nn.functional.linear(x, module.weight, module.bias) * module.scale,)))

    manager = make_manager(plan, addresses=Addresses(watched=lambda: module_tensors(module)))
    manager.capture([FULL_4])
    with torch.no_grad():
        module.weight.copy_(torch.eye(4))
        module.bias.zero_()
    manager.weights_changed()
    x = data(4, 1)
    assert torch.allclose(run_padded(manager, FULL_4, x)[0], x)
    if change == "data":
        module.weight.data = torch.ones(4, 4)
    elif change == "parameter":
        module.bias = torch.nn.Parameter(torch.ones(4))
    else:
        module.scale = torch.ones(4)
    with pytest.raises(AddressChangedError, match={"data": "weight", "parameter": "bias", "buffer": "scale"}[change]):
        manager.weights_changed()


def test_release_frees_the_pool_and_capturing_again_works() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan)
    for _ in range(3):
        manager.capture([FULL_4])
        x = data(4, 1)
        assert torch.equal(run_padded(manager, FULL_4, x)[0], plan(x)[0])
        manager.release()
        assert manager.pool_bytes == 0


def test_inputs_that_never_change_are_passed_as_they_are() -> None:
    plan = ToyPlan([(piece("piece_00", lambda x, w, n: (x @ w + n,)), ("x", "w", "n"), ("y",))], ("y",), ("x", "w", "n"))
    weight = torch.eye(4) * 3
    manager = GraphManager(plan, make_backend("cpu"), inputs=[*make_buffers(4), weight, 2])
    manager.capture([FULL_4])
    x = data(4, 1)
    assert torch.equal(run_padded(manager, FULL_4, x)[0], x * 3 + 2)


def test_two_inputs_of_one_dimension() -> None:
    plan = ToyPlan([(piece("piece_00", lambda ids, x: (x[ids],)), ("ids", "x"), ("y",))], ("y",), ("ids", "x"))
    ids = StaticBuffer(BufferSpec(name="ids", shape=("tokens",), dtype=torch.int64, valid=(0, 4)), capacity={"tokens": 4})
    manager = GraphManager(plan, make_backend("cpu"), inputs=[ids, *make_buffers(4)])
    manager.capture([FULL_4])
    manager.poison()
    x, order = data(3, 1), torch.tensor([2, 0, 1])
    ids.write(order, {"tokens": 4})
    manager.inputs[1].write(x, {"tokens": 4})
    assert torch.equal(manager.run(FULL_4).clone(3)[0], x[order])
    assert out_break_plan().results == ("y",)
