"""The recorded traces of bench/traces: what the default ladder makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.make_traces import FOLDER, WORKLOADS, make_trace
from rung.graphs import Ladder, TraceRun, read_trace
from rung.graphs.coverage import measure_coverage, replay
from rung.graphs.planner import evaluate, histogram, plan_ladder
from rung.graphs.step_cost import StepCosts, modelled_curves


@pytest.fixture(params=sorted(WORKLOADS))
def run(request: pytest.FixtureRequest) -> TraceRun:
    (run,) = read_trace(FOLDER / f"{request.param}.jsonl")
    return run


def test_default_ladder_covers_the_traffic(run: TraceRun) -> None:
    header = replace(run.header, ladder=Ladder.for_requests(512, max_num_tokens=run.header.max_num_tokens).sizes, max_num_requests=512)
    coverage = measure_coverage([replay(run, header)])
    assert coverage.steps == run.num_steps
    assert coverage.share >= 0.99
    assert all(reason.advice for _, reason in coverage.others)


def test_recorded_decisions_are_those_of_the_dispatcher(run: TraceRun) -> None:
    assert replay(run, run.header) == run


def test_planned_sizes_cost_no_more_than_a_trimmed_default(run: TraceRun) -> None:
    steps, costs = histogram([run]), StepCosts(curves=modelled_curves(), max_num_requests=512)
    plan = plan_ladder(steps, costs, 12, limit=512)
    assert len(plan.sizes) <= 12
    assert plan.outcome.mean_cost < evaluate(steps, costs, Ladder.up_to(512).trimmed(12)).mean_cost


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_committed_trace_is_what_the_script_makes(name: str, tmp_path: Path) -> None:
    make_trace(WORKLOADS[name], tmp_path / f"{name}.jsonl")
    made, committed = (folder.joinpath(f"{name}.jsonl").read_bytes() for folder in (tmp_path, FOLDER))
    assert made == committed
    assert len(committed) < 200_000
