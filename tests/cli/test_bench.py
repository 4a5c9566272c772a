from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.cli.conftest import refused

Rung = Callable[..., Result]
QUICK = ("--repeats", 1, "--sets", 2, "--device", "cpu")
ROWS = ("--inputs", "tests.cli.targets:rows")
MODES = ("eager", "compiled", "piecewise", "full")


def rows(result: Result) -> dict[tuple[int, str], dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return {(row["size"], row["mode"]): row for row in json.loads(result.stdout)["rows"]}


def test_decode_steps_run_in_the_mode_of_their_row(rung: Rung) -> None:
    found = rows(rung("bench", "tiny", "--sizes", "1,3,8", "--context", 20, *QUICK, "--json"))
    ran = {key: list(row["ran"]) for key, row in found.items()}
    assert ran == {
        (size, mode): [mode if mode in ("eager", "compiled") else f"{mode} {padded}"]
        for size, padded in ((1, 1), (3, 4), (8, 8))
        for mode in MODES
    }


def test_every_round_of_every_set_is_a_sample(rung: Rung) -> None:
    found = rows(rung("bench", "tiny", "--sizes", 2, "--modes", "eager,compiled", "--context", 8, *QUICK, "--json"))
    assert {row["samples"] for row in found.values()} == {2}
    assert set(found) == {(2, "eager"), (2, "compiled")}


def test_without_a_gpu_only_the_host_columns_are_filled(rung: Rung) -> None:
    result = rung("bench", "tests.cli.targets:Scale", *ROWS, "--sizes", "2", *QUICK, "--json")
    for row in rows(result).values():
        assert row["step_ms"] >= row["host_ms"] > 0
        assert [row[name] for name in ("device_ms", "busy_ms", "launches", "kernels")] == [None] * 4


def test_table_says_which_columns_need_a_gpu(rung: Rung) -> None:
    result = rung("bench", "tests.cli.targets:Scale", *ROWS, "--sizes", "2", "--modes", "eager", *QUICK)
    assert "device ms, busy ms, launches, kernels need a GPU" in result.stdout


def test_a_start_says_where_its_time_went(rung: Rung) -> None:
    words = ("bench", "tests.cli.targets:Scale", *ROWS, "--sizes", "2", "--modes", "compiled", *QUICK)
    phases = json.loads(rung(*words, "--json").stdout)["phases_seconds"]
    assert list(phases) == ["import compiler", "trace", "compile", "check", "load artifacts"]
    assert phases["trace"] > 0
    shown = rung(*words).stdout
    assert "start-up" in shown
    assert "load artifacts" in shown


def test_module_runs_in_four_modes(rung: Rung) -> None:
    found = rows(rung("bench", "tests.cli.targets:Scale", *ROWS, "--sizes", "3,4", *QUICK, "--json"))
    assert {key: list(row["ran"]) for key, row in found.items()} == {(size, mode): [mode] for size in (3, 4) for mode in MODES}


def test_builder_may_return_named_arguments(rung: Rung) -> None:
    result = rung("bench", "tests.cli.targets:Scale", "--inputs", "tests.cli.targets:named_rows", "--sizes", 2, *QUICK, "--json")
    assert set(rows(result)) == {(2, mode) for mode in MODES}


def test_report_says_where_it_was_measured(rung: Rung, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    rung("bench", "tests.cli.targets:Scale", *ROWS, "--sizes", "2", "--modes", "eager", *QUICK, "--out", out)
    report = json.loads(out.read_text())
    assert report["device"].startswith("cpu")
    assert {"versions", "command", "date"} <= set(report)


def test_a_report_that_cannot_be_written_is_printed_all_the_same(rung: Rung) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    result = rung("bench", "tests.cli.targets:Scale", *ROWS, "--sizes", "2", "--modes", "eager", *QUICK, "--out", "/dev/full")
    assert "--out: '/dev/full' cannot be written" in _last_error(result)
    assert "one step, medians" in result.stdout


def test_forward_that_cannot_be_traced_is_refused(rung: Rung) -> None:
    result = rung("bench", "tests.cli.targets:Branches", *ROWS, "--sizes", "4", "--modes", "compiled", *QUICK)
    assert "decides on the size" in _last_error(result)
    assert "targets.py" in _last_error(result)


def test_forward_with_a_side_effect_is_refused(rung: Rung) -> None:
    result = rung("bench", "tests.cli.targets:Prints", *ROWS, "--sizes", "4", "--modes", "compiled", *QUICK)
    assert "Prints.forward" in _last_error(result)


def test_rows_that_mix_are_refused_when_padded(rung: Rung) -> None:
    result = rung("bench", "tests.cli.targets:MixesRows", *ROWS, "--sizes", "3,8", "--modes", "piecewise", *QUICK)
    assert "row" in _last_error(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/model",), "no/such/model"),
        (("tests.cli.targets:Scale",), "--inputs"),
        (("os:nope",), "'os' has no 'nope'"),
        (("nomod:x",), "'nomod' cannot be imported"),
        (("tiny", "--out", "/nonexistent/x.json"), "--out: '/nonexistent/x.json' cannot be written: there is no folder"),
        (("tiny", "--out", "/proc/version/x.json"), "there is no folder"),
        (("tests.cli.targets:Missing", *ROWS), "Missing"),
        (("tests.cli.nothing:Scale", *ROWS), "cannot be imported"),
        (("tests.cli.targets:NUMBER", *ROWS), "not an nn.Module"),
        (("tests.cli.targets:Scale", "--inputs", "tests.cli.targets:fixed", "--sizes", "4"), "no dimension differs"),
        (("tiny", *ROWS), "--inputs"),
        (("tiny", "--context", 500, "--repeats", 20), "context"),
    ],
)
def test_target_that_makes_no_sense_is_refused(rung: Rung, arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(rung("bench", *arguments, "--device", "cpu"))


def test_unknown_mode_is_a_usage_error(rung: Rung) -> None:
    assert rung("bench", "tiny", "--modes", "eager,fast").exit_code == 2


def _last_error(result: Result) -> str:
    """The error line of a run that was refused after it had begun."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr.splitlines()[-1].startswith("hint: ")
    return result.stderr.splitlines()[-2]


@pytest.mark.slow
def test_quantised_model_is_timed(rung: Rung) -> None:
    fp8 = ("--quantize", "fp8", "--kv-cache-dtype", "fp8")
    found = rows(rung("bench", "tiny", "--sizes", 2, "--modes", "eager", "--context", 8, *fp8, *QUICK, "--json"))
    assert set(found) == {(2, "eager")}


def test_quantising_a_module_target_is_refused(rung: Rung) -> None:
    message = refused(rung("bench", "tests.cli.targets:Scale", *ROWS, "--quantize", "fp8", *QUICK))
    assert "are for models" in message


@pytest.mark.parametrize(
    ("target", "inputs", "why"),
    [
        (
            "tests.cli.targets:fails",
            "tests.cli.targets:rows",
            r"TARGET: tests.cli.targets:fails\(\) failed at \S+targets.py:\d+: ValueError: not",
        ),
        (
            "tests.cli.targets:Scale",
            "tests.cli.targets:fails",
            r"--inputs: the function failed for size \d+ at \S+targets.py:\d+: ValueError: not",
        ),
        ("tests.cli.targets:Scale", "tests.cli.targets:too_many", "--inputs: they do not fit forward: too many positional"),
        (
            "rung_test_broken:build",
            "tests.cli.targets:rows",
            r"TARGET: 'rung_test_broken' cannot be imported at \S+broken.py:1: ZeroDivisionError",
        ),
    ],
)
def test_errors_of_the_code_that_a_target_names_are_no_bugs(
    target: str, inputs: str, why: str, rung: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rung_test_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert re.search(why, " ".join(refused(rung("bench", target, "--inputs", inputs, "--sizes", "2", *QUICK)).split()))
