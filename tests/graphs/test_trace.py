"""Step traces: what is written is read back, and neither a full disk nor a bad line goes unnoticed."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.attention.base import CaptureSupport
from rung.errors import ConfigError, TraceFileError
from rung.graphs import ConfiguredMode, GraphMode, Reason, Shape, StepTrace, TracedStep, TraceHeader, read_trace

HEADER = TraceHeader(
    graphs=ConfiguredMode.FULL_AND_PIECEWISE,
    capture_support=CaptureSupport.UNIFORM_BATCH,
    ladder=(1, 2, 4, 8),
    max_num_tokens=64,
    max_num_requests=8,
    max_waste=2.0,
    about={"seed": 1},
)
DECODE = Shape(num_tokens=3, num_requests=3, uniform_query_len=1, max_query_len=1)
MIXED = Shape(num_tokens=7, num_requests=2, max_query_len=6, adapters=1, variant="b", symbols=(("frames", 4),))


def add_steps(trace: StepTrace, *shapes: Shape) -> None:
    for shape in shapes:
        trace.add(shape, GraphMode.FULL, shape.num_tokens + 1, Reason.BEST)


def traced(shape: Shape, count: int = 1) -> TracedStep:
    return TracedStep(shape=shape, mode=GraphMode.FULL, padded=shape.num_tokens + 1, reason=Reason.BEST, count=count)


def test_steps_are_read_back_as_they_were_added(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "steps.jsonl", HEADER)
    add_steps(trace, DECODE, MIXED)
    trace.flush()
    (run,) = read_trace(tmp_path / "steps.jsonl")
    assert (run.header, run.steps) == (HEADER, (traced(DECODE), traced(MIXED)))


def test_equal_steps_in_a_row_share_a_line(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "steps.jsonl", HEADER)
    add_steps(trace, DECODE, DECODE, DECODE, MIXED, DECODE)
    trace.flush()
    (run,) = read_trace(tmp_path / "steps.jsonl")
    assert [step.count for step in run.steps] == [3, 1, 1]
    assert run.num_steps == 5


shapes = st.builds(
    Shape,
    num_tokens=st.integers(0, 600),
    num_requests=st.none() | st.integers(1, 600),
    uniform_query_len=st.none() | st.integers(1, 4),
    max_query_len=st.none() | st.integers(1, 600),
    adapters=st.integers(0, 3),
    variant=st.sampled_from(["", "b", "ü\n"]),
    symbols=st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 9)).map(lambda d: tuple(sorted(d.items()))),
)


@given(st.lists(shapes, max_size=8), st.integers(1, 4))
def test_any_steps_are_read_back(tmp_path_factory: pytest.TempPathFactory, wanted: list[Shape], flush_lines: int) -> None:
    path = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    trace = StepTrace(path, HEADER, flush_lines=flush_lines)
    add_steps(trace, *wanted)
    trace.flush()
    (run,) = read_trace(path)
    assert [step.shape for step in run.steps for _ in range(step.count)] == wanted


def test_lines_are_buffered(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    trace = StepTrace(path, HEADER, flush_lines=2)
    add_steps(trace, DECODE, MIXED)
    assert len(path.read_text().splitlines()) == 1
    add_steps(trace, DECODE)
    assert len(path.read_text().splitlines()) == 3


def test_trace_that_is_gone_has_written_everything(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "steps.jsonl", HEADER)
    add_steps(trace, DECODE)
    del trace
    gc.collect()
    assert read_trace(tmp_path / "steps.jsonl")[0].num_steps == 1


def test_second_trace_appends_a_run(tmp_path: Path) -> None:
    for shape in (DECODE, MIXED):
        trace = StepTrace(tmp_path / "steps.jsonl", HEADER)
        add_steps(trace, shape)
        trace.flush()
    assert [run.steps for run in read_trace(tmp_path / "steps.jsonl")] == [(traced(DECODE),), (traced(MIXED),)]


def test_half_a_line_of_a_killed_process_stays_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(HEADER.as_json()) + '\n{"num_tok')
    StepTrace(path, HEADER)
    with pytest.raises(TraceFileError, match="line 2 is no JSON"):
        read_trace(path)
    assert json.loads(path.read_text().splitlines()[2])["format"] == "rung.steps"


def test_full_disk_warns_once_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(tmp_path / "steps.jsonl", HEADER, flush_lines=1)

    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", no_space)
    with caplog.at_level(logging.WARNING, "rung.graphs.trace"):
        add_steps(trace, DECODE, MIXED, DECODE, MIXED)
        trace.flush()
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]


def test_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        StepTrace(tmp_path / "no" / "steps.jsonl", HEADER)


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda line: line.pop(name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("num_tokens"), "`num_tokens`"),
        (lambda line: line.update(num_tokens=-1), "`num_tokens`"),
        (lambda line: line.update(num_tokens=True), "`num_tokens`"),
        (lambda line: line.update(mode="fast"), "`mode` must be one of none, piecewise, full"),
        (lambda line: line.update(reason="mood"), "`reason`"),
        (lambda line: line.update(count=0), "`count`"),
        (lambda line: line.update(padded=2), "3 tokens cannot run in 2"),
        (lambda line: line.update(colour=1), "unknown key 'colour'"),
        (lambda line: line.update(symbols=[1]), "`symbols`"),
    ],
)
def test_bad_step_is_named_by_its_line(tmp_path: Path, change: Callable[[dict[str, Any]], object], named: str) -> None:
    bad = traced(DECODE).as_json()
    change(bad)
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (HEADER.as_json(), traced(DECODE).as_json(), bad)))
    with pytest.raises(TraceFileError, match="line 3") as error:
        read_trace(path)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is empty"),
        ("{\n", "line 1 is no JSON"),
        ("[1]\n", "expected a JSON object"),
        ('{"num_tokens": 1}\n', "before any header"),
        ('{"format": "rung.steps", "version": 9}\n', "version 9"),
        ('{"format": "rung.steps", "version": 1, "graphs": "fast"}\n', "`graphs`"),
        ('{"format": "rung.steps", "version": 1, "graphs": "none", "ladder": [0]}\n', "`ladder`"),
        ('{"format": "rung.steps", "version": 1, "graphs": "none", "capture_support": "SOME"}\n', "`capture_support`"),
        ('{"format": "rung.steps", "version": 1, "graphs": "none", "limits": {"max_waste": 0}}\n', "`max_waste`"),
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "steps.jsonl").write_text(text)
    with pytest.raises(TraceFileError, match=named):
        read_trace(tmp_path / "steps.jsonl")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot be read"):
        read_trace(tmp_path / "steps.jsonl")


def test_example_of_the_documentation_is_a_trace(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
    (tmp_path / "steps.jsonl").write_text(page.partition("```json\n")[2].partition("```")[0])
    (run,) = read_trace(tmp_path / "steps.jsonl")
    assert (run.header.ladder, run.num_steps) == ((1, 2, 4, 8), 17)
