"""The planner against all ladders there are, and the parts of its answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.attention.base import CaptureSupport
from rung.errors import ConfigError, LadderError
from rung.graphs import ConfiguredMode, GraphMode, Ladder, Reason, Shape, TracedStep, TraceHeader, TraceRun
from rung.graphs.planner import Histogram, evaluate, histogram, plan_ladder
from rung.graphs.step_cost import Curve, StepCosts, measured_curves, modelled_curves

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
ROWS = StepCosts(curves=dict.fromkeys(GraphMode, Curve.affine(0, 1)), max_waste=None)  # a step costs its padded rows

histograms = st.dictionaries(st.tuples(st.integers(1, 20), st.sampled_from([FULL, PIECEWISE])), st.integers(1, 50), min_size=1, max_size=9)
curves = st.dictionaries(st.integers(1, 20), st.integers(1, 100), min_size=1, max_size=4).map(Curve.measured)
step_costs = st.builds(
    StepCosts,
    curves=st.fixed_dictionaries({FULL: curves, PIECEWISE: curves, NONE: curves}),
    max_waste=st.sampled_from([None, 1.2, 2.0]),
    max_num_requests=st.sampled_from([None, 20, 25]),
)


def ladders(sizes: Iterable[int], top: int, count: int) -> list[tuple[int, ...]]:
    """Every ladder of at most `count` of `sizes` with `top` among them, those with fewer sizes first."""
    below = sorted({size for size in sizes if size < top})
    return [(*chosen, top) for k in range(count) for chosen in itertools.combinations(below, k)]


@settings(max_examples=150, deadline=None)
@given(histograms, step_costs, st.integers(1, 5))
def test_no_ladder_of_any_sizes_is_better(steps: Histogram, costs: StepCosts, count: int) -> None:
    plan = plan_ladder(steps, costs, count)
    top = max(tokens for tokens, _ in steps)
    sizes = range(1, top + 1) if count <= 3 else {tokens for tokens, _ in steps}
    totals = {chosen: evaluate(steps, costs, Ladder(chosen)).mean_cost for chosen in ladders(sizes, top, count)}
    assert plan.outcome.mean_cost == pytest.approx(min(totals.values()))
    equals = [chosen for chosen, total in totals.items() if total == pytest.approx(min(totals.values()))]
    assert len(plan.sizes) == min(len(chosen) for chosen in equals)


@settings(max_examples=150, deadline=None)
@given(histograms, step_costs, st.integers(1, 5), st.lists(st.integers(1, 9), min_size=21, max_size=21), st.integers(9, 30))
def test_no_ladder_within_the_budget_is_better(steps: Histogram, costs: StepCosts, count: int, needed: list[int], memory: int) -> None:
    plan = plan_ladder(steps, costs, count, memory=memory, size_bytes=needed.__getitem__)
    assert plan.size_bytes == sum(needed[size] for size in plan.sizes)
    assert plan.size_bytes <= memory
    top = max(tokens for tokens, _ in steps)
    affordable = [c for c in ladders({tokens for tokens, _ in steps}, top, count) if sum(needed[size] for size in c) <= memory]
    totals = {chosen: evaluate(steps, costs, Ladder(chosen)).mean_cost for chosen in affordable}
    assert plan.outcome.mean_cost == pytest.approx(min(totals.values()))
    equals = [chosen for chosen, total in totals.items() if total == pytest.approx(min(totals.values()))]
    assert len(plan.sizes) == min(len(chosen) for chosen in equals)


def test_sizes_go_where_the_steps_are() -> None:
    steps = {(3, FULL): 100, (60, FULL): 100, (64, FULL): 1}
    assert plan_ladder(steps, ROWS, 2).sizes == (3, 64)
    assert plan_ladder(steps, ROWS, 3).sizes == (3, 60, 64)


def test_fewer_sizes_when_more_gain_nothing() -> None:
    assert plan_ladder({(3, FULL): 1, (9, FULL): 1}, ROWS, 50).sizes == (3, 9)
    flat = StepCosts(curves=dict.fromkeys(GraphMode, Curve.affine(5, 0)), max_waste=None)
    assert plan_ladder({(3, FULL): 1, (9, FULL): 1}, flat, 2).sizes == (9,)


def test_maximum_is_always_captured() -> None:
    assert plan_ladder({(3, FULL): 9}, ROWS, 2, maximum=16).sizes == (3, 16)
    assert plan_ladder({(3, FULL): 9}, ROWS, 1, maximum=16).sizes == (16,)


def test_steps_above_the_limit_run_without_a_graph() -> None:
    plan = plan_ladder({(3, FULL): 9, (500, PIECEWISE): 2}, ROWS, 2, limit=100)
    assert (plan.sizes, plan.outcome.steps_without_graph, plan.outcome.steps) == ((3,), 2, 11)


def test_waste_cap_moves_a_size_down() -> None:
    steps = {(20, FULL): 5, (45, FULL): 5}
    costs = StepCosts(curves={FULL: Curve.affine(0, 1), PIECEWISE: Curve.affine(0, 1), NONE: Curve.affine(1000, 1)})
    assert evaluate(steps, costs, Ladder((45,))).steps_without_graph == 5
    assert evaluate(steps, costs, Ladder((40, 45))).steps_without_graph == 0


def test_decodes_are_padded_to_the_maximum_of_requests_at_most() -> None:
    costs = StepCosts(curves=modelled_curves(), max_num_requests=50)
    decode, mixed = (costs.padded(np.array([40]), mode, 64)[0] for mode in (FULL, PIECEWISE))
    assert (decode, mixed) == (50, 64)


def test_outcome_has_the_share_of_padded_rows() -> None:
    outcome = evaluate({(3, FULL): 2, (8, FULL): 1}, ROWS, Ladder((4, 8)))
    assert (outcome.mean_cost, outcome.waste) == (pytest.approx(16 / 3), pytest.approx(2 / 16))


def test_budget_for_equal_sizes_is_a_count() -> None:
    steps = {(size, FULL): 1 for size in range(1, 9)}
    assert len(plan_ladder(steps, ROWS, 8, memory=35, size_bytes=lambda size: 10).sizes) == 3


@pytest.mark.parametrize(
    ("arguments", "named"), [({"count": 0}, "0 sizes"), ({"count": 1, "limit": 2}, "no step"), ({"count": 1, "memory": 5}, "budget is 5")]
)
def test_impossible_plans_are_refused(arguments: Mapping[str, Any], named: str) -> None:
    with pytest.raises(LadderError, match=named):
        plan_ladder({(3, FULL): 1}, ROWS, **arguments, size_bytes=lambda size: 10)


def traced(tokens: int, query_len: int | None, count: int = 1) -> TracedStep:
    shape = Shape(num_tokens=tokens, num_requests=1, uniform_query_len=query_len)
    return TracedStep(shape=shape, mode=NONE, padded=tokens, reason=Reason.TOO_MANY_TOKENS, count=count)


@pytest.mark.parametrize(
    ("graphs", "support", "wanted"),
    [
        ("full_and_piecewise", CaptureSupport.ALWAYS, {(1, FULL): 3, (7, PIECEWISE): 1}),
        ("none", CaptureSupport.NEVER, {(1, FULL): 3, (7, PIECEWISE): 1}),
        ("full_decode_only", CaptureSupport.ALWAYS, {(1, FULL): 3}),
        ("full_and_piecewise", CaptureSupport.NEVER, {(1, PIECEWISE): 3, (7, PIECEWISE): 1}),
    ],
)
def test_steps_count_under_the_mode_that_their_configuration_allows(graphs: str, support: CaptureSupport, wanted: Histogram) -> None:
    header = TraceHeader(graphs=ConfiguredMode(graphs), capture_support=support)
    run = TraceRun(header=header, steps=(traced(1, 1, 2), traced(7, None), traced(1, 1), traced(0, None)))
    assert histogram([run]) == wanted


def row(size: int, mode: str, step_ms: float, ran: str) -> dict[str, Any]:
    return {"size": size, "mode": mode, "step_ms": step_ms, "ran": {ran: 60}}


def test_measured_times_belong_to_the_size_that_ran() -> None:
    rows = [row(50, "full", 2.0, "full 56"), row(64, "full", 1.5, "full 64"), row(128, "full", 2.5, "full 128")]
    rows += [row(1, "full", 9.0, "compiled (too_many_tokens)"), row(1, "eager", 9.0, "eager"), row(8, "compiled", 5.0, "compiled")]
    measured = measured_curves({"rows": rows})
    assert measured[FULL]([1, 56, 64, 96, 192]).tolist() == pytest.approx([2000, 2000, 2000, 2250, 3000])
    assert measured[PIECEWISE] == measured[FULL]
    assert measured[NONE]([1, 100]).tolist() == [5000, 5000]


@pytest.mark.parametrize("report", [{}, {"rows": [{"size": 1}]}, {"rows": [row(1, "eager", 1.0, "eager")]}])
def test_times_without_graphs_are_refused(report: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="times") as error:
        measured_curves(report)
    assert "rung bench" in error.value.hint
