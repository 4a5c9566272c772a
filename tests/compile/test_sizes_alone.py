"""Arguments of which a function reads the size and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rung
from rung.cache import use_store
from rung.counters import Count
from rung.errors import DynamicShapeError, PaddingError
from tests.compile.cases import assert_same

WIDE = torch.randn(64, 4)
ROWS = {"x": {0: "rows"}}


def made(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[0], 4) * 3


def narrowed(x: torch.Tensor, y: Any = WIDE) -> torch.Tensor:
    return y.narrow(0, 0, x.shape[0]) * 2


def expanded(x: torch.Tensor, y: Any = WIDE[:1]) -> torch.Tensor:
    return y.expand(x.shape[0], 4) + 1


def returned(x: torch.Tensor, y: Any = WIDE) -> tuple[torch.Tensor, int]:
    return y * 2, x.shape[0] + 1


def counted(x: torch.Tensor, y: Any = WIDE) -> torch.Tensor:
    return y * x.shape[0]


def of_both(x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    z = x if z is None else z
    return torch.ones(x.shape[0], z.shape[1]) + 1


def broken(x: torch.Tensor, y: Any = WIDE) -> torch.Tensor:
    return torch.ops.rungtest.first_rows(y * 2, x.shape[0]) + 1


FUNCTIONS = (made, narrowed, expanded, returned, counted, of_both, broken)


@pytest.mark.parametrize("graphs", ["none", "piecewise"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_one_trace_serves_every_size_cold_and_warm(function: Callable[..., Any], graphs: str) -> None:
    options: dict[str, Any] = {"dynamic": ROWS, "split_ops": ("rungtest::first_rows",) if function is broken else ()}
    if graphs != "none":
        options |= {"graphs": graphs, "maximum": 8}
    cold = rung.wrap(function, **options)
    for rows in (3, 1, 5, 3):
        x = torch.randn(rows, 7)
        assert_same(cold(x), function(x))
    assert cold.rung.counters[Count.DYNAMO_TRACES] == 1
    with use_store(require_hit=True):
        warm = rung.wrap(function, **options)
        for rows in (2, 6):
            x = torch.randn(rows, 7)
            assert_same(warm(x), function(x))
    assert warm.rung.counters[Count.PLAN_HITS] == 1
    assert warm.rung.counters[Count.DYNAMO_TRACES] == 0


def test_rows_that_are_made_may_be_padded() -> None:
    wrapped = rung.wrap(made, dynamic=ROWS, graphs="full", pad=("rows",), maximum=8)
    assert_same(wrapped(torch.randn(3, 7)), made(torch.randn(3, 7)))


def test_a_value_that_is_computed_from_the_number_of_rows_is_not_padded() -> None:
    wrapped = rung.wrap(counted, dynamic=ROWS, graphs="full", pad=("rows",), maximum=8)
    with pytest.raises(PaddingError):
        wrapped(torch.randn(3, 7))


def test_inside_of_a_container() -> None:
    def function(batch: dict[str, torch.Tensor], y: Any) -> torch.Tensor:
        return torch.ones(batch["x"].shape[0], 4) + y

    wrapped = rung.wrap(function, dynamic={"batch.x": {0: "rows"}})
    for rows in (3, 5, 4):
        x, y = torch.randn(rows, 7), torch.randn(1, 4)
        assert_same(wrapped({"x": x}, y), function({"x": x}, y))
    assert wrapped.rung.counters[Count.DYNAMO_TRACES] == 1


def test_nobody_declared_it() -> None:
    wrapped = rung.wrap(made)
    for rows in (3, 5, 4):
        x = torch.randn(rows, 7)
        assert_same(wrapped(x), made(x))
    assert wrapped.rung.counters[Count.DYNAMO_TRACES] == 1


def test_what_is_fixed_is_told_as_of_any_argument() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape[0], 4) + torch.ones(5, 4)

    with pytest.raises(DynamicShapeError, match=r"'rows'.* of argument 'x' to 5|rows, 5"):
        rung.wrap(function, dynamic=ROWS)(torch.randn(5, 7))
