"""What the linter finds in a ladder, and what a trace shows beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rung.attention.base import CaptureSupport
from rung.graphs import ConfiguredMode, GraphMode, Ladder, Reason, Shape, TracedStep, TraceHeader, TraceRun
from rung.graphs.coverage import measure_coverage, replay
from rung.graphs.lint import LintReport, Rule, lint

SETUP = TraceHeader(
    graphs=ConfiguredMode.FULL_AND_PIECEWISE,
    capture_support=CaptureSupport.UNIFORM_BATCH,
    ladder=Ladder.for_requests(64).sizes,
    max_num_tokens=2048,
    max_num_requests=64,
    max_waste=2.0,
)


def decode(requests: int, count: int = 1) -> TracedStep:
    shape = Shape(num_tokens=requests, num_requests=requests, uniform_query_len=1, max_query_len=1)
    return TracedStep(shape=shape, mode=GraphMode.NONE, padded=requests, reason=Reason.GRAPHS_OFF, count=count)


def mixed(tokens: int, count: int = 1) -> TracedStep:
    shape = Shape(num_tokens=tokens, num_requests=2, max_query_len=tokens - 1)
    return TracedStep(shape=shape, mode=GraphMode.NONE, padded=tokens, reason=Reason.GRAPHS_OFF, count=count)


def recorded(*steps: TracedStep, setup: TraceHeader = SETUP) -> TraceRun:
    return replay(TraceRun(header=setup, steps=steps), setup)


def problems(report: LintReport) -> dict[Rule, str]:
    return {finding.rule: finding.message for finding in report.problems}


def test_default_ladder_has_no_problem() -> None:
    report = lint(SETUP.ladder, SETUP)
    assert problems(report) == {}
    assert [finding.rule for finding in report.findings] == [Rule.STEPS_ABOVE_TOP]


@pytest.mark.parametrize(
    ("sizes", "rule", "named"),
    [
        ([], Rule.EMPTY, "no size"),
        ([*SETUP.ladder, 8, 8, 4], Rule.DUPLICATE, "4, 8"),
        ([*SETUP.ladder, 4096], Rule.ABOVE_MAXIMUM, "4096"),
        ([1, 2, 4, 8, 16, 32], Rule.LARGEST_NOT_CAPTURED, "33 to 64 requests"),
        ([1, 2, 4, 8, 64], Rule.WASTE, "9..31 tokens"),
    ],
)
def test_static_problem(sizes: list[int], rule: Rule, named: str) -> None:
    found = problems(lint(sizes, SETUP))
    assert list(found) == [rule]
    assert named in found[rule]


def test_any_size_above_the_requests_captures_all_of_them() -> None:
    setup = replace(SETUP, max_num_requests=30)
    assert problems(lint([1, 2, 4, 8, 15, 64], setup)) == {}  # 16..30 run in the full graph of 30


def test_advice_for_waste_mends_it() -> None:
    advice = next(finding.advice for finding in lint([1, 2, 4, 8, 64], SETUP).findings if finding.rule is Rule.WASTE)
    assert advice.endswith(": 31")
    assert Rule.WASTE not in problems(lint([1, 2, 4, 8, 16, 31, 64], SETUP))


def test_mixed_steps_in_piecewise_graphs_are_covered_when_full_ones_were_not_planned_for_them() -> None:
    coverage = measure_coverage([recorded(decode(3, 5), mixed(20, 5))])
    assert (coverage.share, coverage.steps, coverage.hits) == (1.0, 10, {4: 5, 24: 5})
    assert coverage.waste == pytest.approx(1 - (15 + 100) / (20 + 120))


def test_coverage_below_the_goal_names_the_reason_and_what_to_do() -> None:
    run = recorded(decode(3, 90), mixed(1000, 10))
    report = lint(SETUP.ladder, SETUP, [run])
    (finding,) = report.problems
    assert finding.rule is Rule.COVERAGE
    assert "90.0% of 100 steps" in finding.message
    assert finding.advice == Reason.TOO_MANY_TOKENS.advice
    assert report.coverage is not None
    assert report.coverage.others == {(GraphMode.NONE, Reason.TOO_MANY_TOKENS): 10}


def test_decodes_in_piecewise_graphs_are_not_covered() -> None:
    step = replace(decode(3), mode=GraphMode.PIECEWISE, padded=4, reason=Reason.CAPTURE_FAILED)
    coverage = measure_coverage([TraceRun(header=SETUP, steps=(step,))])
    assert coverage.others == {(GraphMode.PIECEWISE, Reason.CAPTURE_FAILED): 1}


def test_limit_of_the_backend_is_no_fault_of_the_ladder() -> None:
    setup = replace(SETUP, capture_support=CaptureSupport.NEVER)
    assert measure_coverage([recorded(decode(3), setup=setup)]).share == 1.0


def test_sizes_that_were_never_hit_are_a_note() -> None:
    report = lint(SETUP.ladder, SETUP, [recorded(decode(3, 50), decode(8, 50))])
    note = next(finding for finding in report.findings if finding.rule is Rule.NEVER_HIT)
    assert not note.is_problem
    assert note.message == "17 of 19 sizes were never hit: 1..2, 16..128"


def test_common_recorded_sizes_are_checked_for_waste() -> None:
    setup = replace(SETUP, max_num_requests=8)
    found = problems(lint([1, 2, 4, 8, 256], setup, [recorded(mixed(100), setup=setup)]))
    assert "100 tokens" in found[Rule.WASTE]


def test_steps_without_tokens_do_not_count() -> None:
    assert measure_coverage([recorded(mixed(2), decode(0))]).steps == 1
