"""`rung ladder lint` and `rung ladder plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rung.errors import TraceFileError
from rung.graphs import ConfiguredMode, GraphMode, Ladder, Reason, Shape, StepTrace, TraceHeader
from tests.cli.conftest import refused
from tests.graphs.toys import both_modes, fresh_break_plan, make_manager


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """90 decodes of 3 requests and 10 prompts of 40 tokens, on a ladder that ends at 32."""
    header = TraceHeader(
        graphs=ConfiguredMode.FULL_AND_PIECEWISE, ladder=(1, 2, 4, 8, 16, 32), max_num_tokens=64, max_num_requests=8, max_waste=2.0
    )
    recorded = StepTrace(tmp_path / "steps.jsonl", header)
    for _ in range(90):
        decode = Shape(num_tokens=3, num_requests=3, uniform_query_len=1, max_query_len=1)
        recorded.add(decode, GraphMode.FULL, 4, Reason.BEST)
    for _ in range(10):
        recorded.add(Shape(num_tokens=40, num_requests=1, max_query_len=40), GraphMode.NONE, 40, Reason.TOO_MANY_TOKENS)
    recorded.flush()
    return tmp_path / "steps.jsonl"


def test_lint_of_the_default_ladder_is_clean(rung: Callable[..., Result]) -> None:
    result = rung("ladder", "lint")
    assert result.exit_code == 0
    assert "0 problems" in result.stdout


def test_lint_with_a_problem_exits_with_one(rung: Callable[..., Result]) -> None:
    result = rung("ladder", "lint", "--sizes", "1,2,4,4", "--max-num-requests", 16, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert {one["rule"] for one in report["findings"] if one["problem"]} == {"duplicate", "largest_not_captured"}


def test_lint_shows_the_recorded_coverage(rung: Callable[..., Result], trace: Path) -> None:
    result = rung("ladder", "lint", "--trace", trace, "--json")
    assert result.exit_code == 1
    coverage = json.loads(result.stdout)["coverage"]
    assert (coverage["share"], coverage["steps"], coverage["hits"]) == (0.9, 100, {"4": 90})
    assert [(one["mode"], one["reason"], one["steps"]) for one in coverage["others"]] == [("none", "too_many_tokens", 10)]
    assert "capture a larger size" in rung("ladder", "lint", "--trace", trace).stdout


def test_lint_tries_other_sizes_on_the_recorded_steps(rung: Callable[..., Result], trace: Path) -> None:
    result = rung("ladder", "lint", "--trace", trace, "--sizes", "1,2,4,8,40", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["coverage"]["share"], report["coverage"]["hits"]) == (1.0, {"4": 90, "40": 10})
    assert report["coverage"]["waste"] == pytest.approx(1 - (90 * 3 + 400) / (90 * 4 + 400))


def test_plan_prints_a_list_for_capture_sizes(rung: Callable[..., Result], trace: Path) -> None:
    result = rung("ladder", "plan", "--trace", trace, "--sizes", 2, "--max", 40)
    assert result.stdout == "3,40\n"
    assert "recorded ladder" in result.stderr


def test_plan_compares_with_the_recorded_ladder(rung: Callable[..., Result], trace: Path) -> None:
    report = json.loads(rung("ladder", "plan", "--trace", trace, "--sizes", 5, "--max", 40, "--json").stdout)
    assert report["sizes"] == [3, 40]
    assert (report["before"]["waste"], report["before"]["steps_without_graph"]) == (0.25, 10)
    assert (report["after"]["waste"], report["after"]["steps_without_graph"]) == (0.0, 0)


def test_plan_without_a_maximum_stays_below_the_recorded_top(rung: Callable[..., Result], trace: Path) -> None:
    assert json.loads(rung("ladder", "plan", "--trace", trace, "--sizes", 5, "--json").stdout)["sizes"] == [3]


def test_plan_keeps_the_budget(rung: Callable[..., Result], trace: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_text('{"3": 10, "40": 50}')
    options = ("ladder", "plan", "--trace", trace, "--sizes", 5, "--max", 40, "--json")
    report = json.loads(rung(*options, "--size-bytes", tmp_path / "bytes.json", "--memory", 59).stdout)
    assert (report["sizes"], report["bytes"]) == ([40], 50)
    assert json.loads(rung(*options, "--size-bytes", 30, "--memory", 60).stdout)["bytes"] == 60
    assert "budget is 9" in refused(rung(*options, "--size-bytes", 30, "--memory", 9))


def test_plan_takes_the_model_of_captured_graphs(rung: Callable[..., Result], trace: Path, tmp_path: Path) -> None:
    manager = make_manager(fresh_break_plan(), capacity=64)
    manager.capture(both_modes(Ladder.up_to(64)))
    memory = manager.memory()
    assert memory.model is not None
    shared = dataclasses.replace(memory.model, shared_pool=True)
    (tmp_path / "bench.json").write_text(json.dumps({"graph_memory": {**memory.as_json(), "model": shared.as_json()}}))
    options = ("ladder", "plan", "--trace", trace, "--sizes", 5, "--max", 40, "--size-bytes", tmp_path / "bench.json", "--json")
    report = json.loads(rung(*options).stdout)
    assert report["bytes"] == shared.shared_pool_bytes(40) + shared.size_bytes(3) + shared.size_bytes(40)
    assert report["bytes_from"].startswith("predicted from")
    assert json.loads(rung(*options, "--memory", report["bytes"] - 1).stdout)["sizes"] == [40]


def test_plan_says_when_bytes_are_assumed(rung: Callable[..., Result], trace: Path) -> None:
    result = rung("ladder", "plan", "--trace", trace, "--sizes", 2, "--max", 40)
    assert "20.0 MiB (assumed: 10 MiB a size)" in result.stderr


def test_plan_refuses_a_bench_without_graphs(rung: Callable[..., Result], trace: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text('{"graph_memory": null}')
    assert "no graph was captured" in refused(
        rung("ladder", "plan", "--trace", trace, "--sizes", 2, "--size-bytes", tmp_path / "bench.json")
    )


def test_plan_takes_measured_times(rung: Callable[..., Result], trace: Path, tmp_path: Path) -> None:
    times = [{"size": size, "mode": "full", "step_ms": 1.0, "ran": {f"full {size}": 9}} for size in (1, 40)]
    (tmp_path / "times.json").write_text(json.dumps({"rows": times}))
    options = ("ladder", "plan", "--trace", trace, "--sizes", 5, "--max", 8, "--json")
    report = json.loads(rung(*options, "--times", tmp_path / "times.json").stdout)
    assert report["sizes"] == [8]  # every size takes the same time, so one is enough
    assert report["after"]["mean_step_us"] == 1000


@pytest.mark.parametrize("option", ["--times", "--size-bytes"])
def test_plan_refuses_files_that_are_not_what_they_should_be(rung: Callable[..., Result], trace: Path, option: str) -> None:
    assert option.strip("-").split("-")[0] in refused(rung("ladder", "plan", "--trace", trace, "--sizes", 5, option, trace))


def test_bad_trace_is_one_line_and_a_hint(rung: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("{")
    assert "line 1" in refused(rung("ladder", "lint", "--trace", tmp_path / "steps.jsonl"))


def test_debug_of_a_command_below_shows_the_error_itself(rung: Callable[..., Result], tmp_path: Path) -> None:
    with pytest.raises(TraceFileError):
        rung("ladder", "plan", "--trace", tmp_path / "none", "--sizes", 1, "--debug")


def test_both_commands_have_help(rung: Callable[..., Result]) -> None:
    assert all("--trace" in rung("ladder", command, "--help").output for command in ("lint", "plan"))


def test_generate_writes_a_trace_that_lint_reads(rung: Callable[..., Result], model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    options = ("--max-tokens", 4, "--dtype", "float32", "--device", "cpu", "--json")
    summary = json.loads(rung("generate", model_folder, "hello", "--mode", "eager", "--step-trace", path, *options).stdout)
    assert json.loads(rung("ladder", "lint", "--trace", path, "--json").stdout)["coverage"]["steps"] == sum(summary["steps"].values())
