"""Capture by traffic: counts, order, the time budget, and what runs meanwhile."""

from __future__ import annotations

import pytest
import torch

from rung.graphs import Descriptor, Dispatcher, GraphManager, GraphMode, Ladder, Reason, Shape, plan_descriptors
from rung.graphs import traffic as traffic_module
from rung.graphs.descriptor import ConfiguredMode
from rung.graphs.traffic import LiveDispatcher, Traffic
from tests.graphs.toys import data, fresh_break_plan, make_manager, run_padded

LADDER = Ladder.custom([4, 8, 16])
PLANNED = plan_descriptors(LADDER, ConfiguredMode.PIECEWISE)


def size(tokens: int) -> Descriptor:
    return Descriptor(mode=GraphMode.PIECEWISE, num_tokens=tokens)


def live(manager: GraphManager, after: int | None) -> LiveDispatcher:
    return LiveDispatcher(PLANNED, lambda failed: Dispatcher(PLANNED, failed=failed), manager, Traffic(after) if after else None)


def test_most_frequent_first_and_only_what_is_due() -> None:
    traffic = Traffic(2)
    for tokens in (4, 8, 8, 16, 16, 16):
        traffic.miss(size(tokens))
    assert traffic.due == [size(16), size(8)]


def test_budget_lets_one_through_and_another_only_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(traffic_module.time, "perf_counter", lambda: clock[0])
    traffic, captured = Traffic(1), []

    def capture(descriptor: Descriptor) -> None:
        captured.append(descriptor.num_tokens)
        clock[0] += 1.0

    for tokens in (4, 8, 16, 32):
        traffic.miss(size(tokens))
    assert traffic.capture_due(capture, 0.1) == 1
    assert traffic.capture_due(capture, 2.5) == 2
    assert traffic.capture_due(capture) == 1
    assert captured == [4, 8, 16, 32]


def test_steps_take_the_next_best_until_their_graph_is_there() -> None:
    plan = fresh_break_plan()
    manager = make_manager(plan)
    manager.capture([size(8)])
    dispatcher = live(manager, 2)
    chosen = [dispatcher.dispatch(Shape(num_tokens=tokens)) for tokens in (3, 16, 3)]
    assert [(choice.descriptor.mode, choice.descriptor.num_tokens, choice.reason) for choice in chosen] == [
        ("piecewise", 8, Reason.CAPTURE_PENDING),
        ("none", 16, Reason.CAPTURE_PENDING),
        ("piecewise", 8, Reason.CAPTURE_PENDING),
    ]
    assert dispatcher.traffic is not None
    assert dispatcher.traffic.capture_due(lambda descriptor: manager.capture([descriptor])) == 1
    choice = dispatcher.dispatch(Shape(num_tokens=3))
    assert (choice.descriptor, choice.reason) == (size(4), Reason.BEST)
    x = data(3, 1)
    assert torch.equal(run_padded(manager, choice.descriptor, x)[0], plan(x)[0])


def test_suspended_graphs_are_the_reason() -> None:
    manager = make_manager(fresh_break_plan())
    manager.capture(PLANNED)
    dispatcher = live(manager, None)
    manager.suspend()
    choice = dispatcher.dispatch(Shape(num_tokens=3))
    assert (choice.descriptor.mode, choice.descriptor.num_tokens, choice.reason) == ("none", 3, Reason.SUSPENDED)
    manager.resume()
    assert dispatcher.dispatch(Shape(num_tokens=3)).reason is Reason.BEST


def test_without_traffic_a_planned_graph_is_chosen_before_it_is_captured() -> None:
    manager = make_manager(fresh_break_plan())
    assert live(manager, None).dispatch(Shape(num_tokens=3)).descriptor == size(4)
