"""Wrapped things inside of wrapped things, and what other parts of torch and Python do with them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.counters import Count

ROWS = {"x": {0: "rows"}}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@rung.compiled(dynamic=ROWS)
class Inner(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two, self.three, self.plain = Inner(2.0), Inner(3.0), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.two(x) + self.three(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x) - 1


X = torch.arange(6.0).view(3, 2)
EXPECTED = torch.sigmoid(X * 5)


def test_a_wrapped_module_of_decorated_and_wrapped_ones_is_one_trace() -> None:
    outer = Outer()
    rung.wrap(outer.plain, dynamic={"input": {0: "rows"}})
    rung.wrap(outer, dynamic=ROWS)
    torch.testing.assert_close(outer(X), EXPECTED)
    assert outer.rung.counters[Count.DYNAMO_TRACES] == 1
    assert outer.two.rung.counters[Count.DYNAMO_TRACES] == 0
    assert outer.rung.report()[0]["guards"]["unknown"] == []


def test_decorated_modules_of_an_unwrapped_one_compile_on_their_own() -> None:
    outer = Outer()
    torch.testing.assert_close(outer(X), EXPECTED)
    assert outer.two.rung.counters[Count.DYNAMO_TRACES] == outer.three.rung.counters[Count.DYNAMO_TRACES] == 1


def test_another_method_reaches_decorated_submodules() -> None:
    outer = rung.wrap(Outer(), method="encode", dynamic=ROWS)
    assert torch.equal(outer.encode(X), X * 2 - 1)
    torch.testing.assert_close(outer(X), EXPECTED)


def test_a_bound_method_of_a_decorated_class() -> None:
    method = rung.wrap(Inner(4.0).forward, dynamic=ROWS)
    assert torch.equal(method(X), X * 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_of_compiled_modules_compile_anew(copied: Any) -> None:
    outer = Outer()
    outer(X)
    again = copied(outer)
    again.two.factor = 7.0
    torch.testing.assert_close(again(X), torch.sigmoid(X * 10))
    torch.testing.assert_close(outer(X), EXPECTED)
    assert again.two.rung.counters[Count.DYNAMO_TRACES] == 1


def test_torch_export_sees_through() -> None:
    exported = torch.export.export(rung.wrap(Outer(), dynamic=ROWS), (X,)).module()
    torch.testing.assert_close(exported(X), EXPECTED)
