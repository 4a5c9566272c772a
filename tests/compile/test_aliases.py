"""Writes and views across cuts, with compiled pieces: equal to the original, or refused with a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rung
from rung.errors import RungError
from tests.compile.cases import TOY_OPS, assert_same, double

ops = torch.ops.rungtest


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def write_into_view(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], 4)
    ops.write(x.view(-1, 2, 2) + 1, out.view(-1, 2, 2))
    return out * 3


def update_base_then_read_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    view = y[:, :2]
    z = double(view)
    y.add_(1)
    return view + z


def update_view_then_read_base(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    view = y[:, :2]
    z = double(view)
    view.mul_(10)
    return y[:, :2] + z


def write_then_read_then_write(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x + 1
    ops.write(x, y, 5.0)
    between = y + 1
    ops.write(x, y, 7.0)
    return between, y


def update_returned_value(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = double(y)
    y.add_(z)
    return y


FUNCTIONS = [write_into_view, update_base_then_read_view, update_view_then_read_base, write_then_read_then_write, update_returned_value]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_equals_original_or_is_refused(function: Callable[..., Any]) -> None:
    compiled = rung.wrap(function, dynamic={"x": {0: "rows"}}, split_ops=TOY_OPS)
    for rows in (3, 1):
        x = torch.randn(rows, 4)
        expected = function(x.clone())
        try:
            actual = compiled(x)
        except RungError as error:
            assert error.hint  # noqa: PT017 - an error is as good as the right value
            return
        assert_same(actual, expected)


def test_write_then_read_then_write_is_not_refused() -> None:
    compiled = rung.wrap(write_then_read_then_write, dynamic={"x": {0: "rows"}}, split_ops=TOY_OPS)
    x = torch.randn(3, 4)
    assert_same(compiled(x), write_then_read_then_write(x))
