from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from click.testing import Result

from rung.cli.check_row import rows_of
from rung.graphs.backends.recorded import RecordedBackend
from tests.cli.conftest import refused

Rung = Callable[..., Result]
MODES = ("compiled", "piecewise", "full")
SCALE = ("verify", "tests.cli.targets:Scale", "--inputs", "tests.cli.targets:rows", "--device", "cpu")


def checks(result: Result, exit_code: int = 0) -> dict[tuple[int, str, int], dict[str, Any]]:
    assert result.exit_code == exit_code, result.stderr
    return {(row["size"], row["mode"], row["data"]): row for row in json.loads(result.stdout)["checks"] if row["mode"] in MODES}


def seed_fault(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The piece `name` computes something else when it is captured."""
    call_piece = RecordedBackend.call_piece

    def wrong(self: RecordedBackend, step: Any, arguments: list[Any]) -> Sequence[Any]:
        outputs = call_piece(self, step, arguments)
        return [outputs[0] + 1, *outputs[1:]] if step.name == name else outputs

    monkeypatch.setattr(RecordedBackend, "call_piece", wrong)


def test_module_agrees_in_every_mode_and_padded(rung: Rung) -> None:
    found = checks(rung(*SCALE, "--sizes", "1,4", "--json"))
    assert set(found) == {(size, mode, data) for size in (1, 4) for mode in MODES for data in (0, 1)}
    assert {row["rows"] for (size, _, data), row in found.items() if (size, data) == (4, 1)} == {3}
    assert {row["bits"] for (_, mode, _), row in found.items() if mode != "compiled"} == {True}


def test_seeded_fault_of_a_module_is_named(rung: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(monkeypatch, "piece_00")
    found = checks(rung(*SCALE, "--sizes", "1,4", "--json"), exit_code=1)
    assert {(row["mode"], row["passed"], row["step"]) for row in found.values()} == {
        ("compiled", True, ""),
        ("piecewise", False, "piece_00"),
        ("full", False, "piece_00"),
    }


def test_rows_that_mix_are_compared_at_exact_sizes(rung: Rung) -> None:
    result = rung("verify", "tests.cli.targets:MixesRows", *SCALE[2:], "--sizes", "4", "--json")
    assert {row["rows"] for row in checks(result).values()} == {4}
    assert json.loads(result.stdout)["padding"].startswith("exact sizes only")


def test_tolerance_below_rounding_is_a_difference(rung: Rung) -> None:
    result = rung("verify", "tiny", "--sizes", "3", "--sets", 1, "--context", 8, "--tolerance", 0, "--no-pieces", "--device", "cpu")
    assert result.exit_code == 1
    assert "DIFFERS: beyond the tolerance" in result.stdout
    assert "3 checks, 3 wrong" in result.stdout


def test_language_model_agrees_and_its_wrong_piece_is_named(rung: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("verify", "tiny", "--sizes", "1,4", "--context", 8, "--device", "cpu", "--json")
    found = checks(rung(*arguments))
    assert set(found) == {(size, mode, data) for size in (1, 4) for mode in MODES for data in (0, 1)}
    name = "piece_02"
    seed_fault(monkeypatch, name)
    found = checks(rung(*arguments), exit_code=1)
    assert {(row["mode"], row["step"]) for row in found.values()} == {("compiled", ""), ("piecewise", name), ("full", name)}


@pytest.mark.parametrize(("target", "steps"), [(SCALE[1:4], {"piece_00"}), (("tiny",), {"piece_00", "piece_01 x2", "piece_03"})])
def test_each_unique_piece_is_compared_with_its_trace(rung: Rung, target: tuple[str, ...], steps: set[str]) -> None:
    result = rung("verify", *target, "--sizes", "1,4", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    rows = [row for row in json.loads(result.stdout)["checks"] if row["mode"] not in MODES]
    assert {(row["size"], row["mode"], row["data"]) for row in rows} == {(size, step, 0) for size in (1, 4) for step in steps}
    assert all(row["passed"] and row["tolerance"] == 1e-4 for row in rows)


def test_table_says_what_was_allowed(rung: Rung) -> None:
    result = rung(*SCALE, "--sizes", "2", "--sets", 1, "--no-pieces")
    assert result.exit_code == 0
    assert "bit by bit" in result.stdout
    assert "1e-04" in result.stdout
    assert "3 checks, 0 wrong; padded rows are proved harmless" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tests.cli.targets:Scale",), "--inputs"),
        (("os:nope",), "'os' has no 'nope'"),
        (("nomod:x",), "'nomod' cannot be imported"),
        (("tiny", "--inputs", "tests.cli.targets:rows"), "--inputs"),
        (("no/such/model",), "no/such/model"),
    ],
)
def test_target_that_makes_no_sense_is_refused(rung: Rung, arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(rung("verify", *arguments, "--device", "cpu"))


def test_every_other_data_set_is_padded_where_that_is_the_same_size() -> None:
    assert [rows_of((1, 2, 4, 8), size, data) for size in (1, 2, 4, 8) for data in (0, 1)] == [1, 1, 2, 2, 4, 3, 8, 7]
