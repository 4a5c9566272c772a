"""Dimensions that are taken away at size 1: a graph for every size cannot do so, and says where."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rung
from rung.compile.trace import trace
from rung.counters import Count
from rung.errors import DynamicShapeError
from tests.compile.cases import assert_same, bound

X = torch.ones(4, 3, 1)
LOSING: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda x: x.squeeze() + 1,
    "the dynamic one": lambda x: torch.squeeze(x, 0) + 1,
    "by keyword": lambda x: torch.squeeze(input=x, dim=-3) + 1,
    "among others": lambda x: x.squeeze((0, 2)) + 1,
    "as a copy": lambda x: torch.squeeze_copy(x) + 1,
    "as an op": lambda x: torch.ops.aten.squeeze.dim(x, 0) + 1,
    "of numpy": lambda x: torch.from_numpy(np.squeeze(x.numpy())) * 2,
    "computed": lambda x: (x + x).reshape(-1, 3).squeeze(0) + 1,
}
KEEPING: dict[str, Callable[[torch.Tensor], Any]] = {
    "the last": lambda x: x.squeeze(-1) + 1,
    "one of another size": lambda x: x.squeeze(1) + 1,
    "several": lambda x: x.squeeze((1, 2)) + 1,
    "at least two rows": lambda x: torch.cat([x, x]).squeeze() + 1,
    "behind a sum": lambda x: x.sum(0, keepdim=True).squeeze(0) + 1,
}


@pytest.mark.parametrize("case", LOSING)
def test_a_dynamic_dimension_is_not_taken_away(case: str) -> None:
    function = LOSING[case]
    line = inspect.getsourcelines(function)[1]
    with pytest.raises(DynamicShapeError, match=rf"where its size, rows, is 1 at .*test_squeeze.py:{line} .*\n?hint: .*squeeze\(-1\)"):
        trace(function, bound(function, [X]), {"x": {0: "rows"}})


@pytest.mark.parametrize("case", KEEPING)
def test_dimensions_of_fixed_size_are(case: str) -> None:
    function = KEEPING[case]
    trace(function, bound(function, [X]), {"x": {0: "rows"}})


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze()


def test_no_call_of_a_declared_dimension_is_compiled() -> None:
    module = rung.wrap(Scores().requires_grad_(False), dynamic={"x": {0: "rows"}})
    for rows in (4, 1):
        with pytest.raises(DynamicShapeError, match=r"Scores.forward takes dimension 0 away .*return self.linear\(x\).squeeze\(\)"):
            module(torch.randn(rows, 3))


def test_an_undeclared_dimension_is_traced_for_each_size() -> None:
    eager = Scores().requires_grad_(False)
    module = rung.wrap(Scores().requires_grad_(False))
    module.load_state_dict(eager.state_dict())
    for rows in (4, 1, 4):
        x = torch.randn(rows, 3)
        assert_same(module(x), eager(x))
    assert module.rung.counters[Count.DYNAMO_TRACES] > 1  # type: ignore[union-attr, operator]
