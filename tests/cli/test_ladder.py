from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from tests.cli.conftest import refused


def test_prints_the_series(rung: Callable[..., Result]) -> None:
    assert json.loads(rung("ladder", "--max", 20, "--json").stdout)["sizes"] == [1, 2, 4, 8, 16, 20]


def test_waste_is_the_share_of_padded_rows(rung: Callable[..., Result]) -> None:
    report = json.loads(rung("ladder", "--max", 4, "--sizes", "4", "--json").stdout)
    assert report["mean_waste"] == pytest.approx(1 - (1 + 2 + 3 + 4) / 16)
    assert report["worst_waste"] == 3 / 4


def test_sizes_alone_are_the_ladder(rung: Callable[..., Result]) -> None:
    assert json.loads(rung("ladder", "--sizes", "4,1,16", "--json").stdout)["sizes"] == [1, 4, 16]


def test_trim_keeps_the_top(rung: Callable[..., Result]) -> None:
    sizes = json.loads(rung("ladder", "--max", 512, "--trim", 5, "--json").stdout)["sizes"]
    assert (len(sizes), sizes[-1]) == (5, 512)


def test_table_has_a_row_for_each_size(rung: Callable[..., Result]) -> None:
    output = rung("ladder", "--max", 8).stdout
    assert "5..8" in output
    assert "4 sizes up to 8" in output


def test_size_above_the_maximum_is_refused(rung: Callable[..., Result]) -> None:
    assert "above the maximum 8" in refused(rung("ladder", "--max", 8, "--sizes", "4,9"))


@pytest.mark.parametrize("option", ["--max", "--sizes"])
def test_size_that_no_step_has_is_refused(option: str, rung: Callable[..., Result]) -> None:
    assert f"{option}: 99999999999 is above 1048576" in refused(rung("ladder", option, "99999999999"))


def test_size_that_is_no_number_is_a_usage_error(rung: Callable[..., Result]) -> None:
    result = rung("ladder", "--sizes", "4,x")
    assert result.exit_code == 2
    assert "list of integers" in result.stderr
