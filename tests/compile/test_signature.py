"""Functions whose own code takes `*args, **kwargs`, as decorators leave them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.compile.arguments import dynamic_dims, leaves
from rung.compile.paths import Path
from rung.compile.signature import argument_path, own_signature, self_name
from rung.errors import DynamicShapeError
from tests.compile.cases import bound, uncompiled


def doubled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs) * kwargs.get("factor", 2.0)

    return wrapper


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)
        self.offset = 1.0

    @doubled
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, factor: float = 0.0) -> torch.Tensor:
        return x * self.weight + self.offset + (0 if y is None else y)


def test_calls_by_position_and_by_keyword_equal_eager_and_follow_attributes() -> None:
    eager, module = Scale(), rung.wrap(Scale(), dynamic={"x": {0: "rows"}, "y": {0: "rows"}})
    x = torch.arange(6.0).view(3, 2)
    for offset in (1.0, 5.0):
        eager.offset = module.offset = offset
        for args, kwargs in [((x,), {"factor": 3.0}), ((), {"x": x}), ((x[:2],), {"factor": 3.0})]:
            assert torch.equal(module(*args, **kwargs), eager(*args, **kwargs))
    assert module.rung.counters["dynamo_traces"] == 4  # two ways to call, two values of the attribute; rows are dynamic
    assert module.rung.counters["eager_calls"] == 0


def test_the_object_and_the_arguments_are_told_apart() -> None:
    function = Scale().forward
    assert self_name(function) == "self"
    assert str(own_signature(function)).startswith("(*args, **kwargs)")
    assert argument_path(Path("args", (("item", 0), ("attr", "weight"))), function) == Path("self", (("attr", "weight"),))
    assert argument_path(Path("args", (("item", 2),), 1), function) == Path("args", (("item", 1),), 1)


@pytest.mark.parametrize(("args", "kwargs", "where"), [((torch.ones(2, 2),), {}, "args.0"), ((), {"x": torch.ones(2, 2)}, "kwargs.x")])
def test_dimensions_are_named_as_the_caller_names_arguments(args: Any, kwargs: Any, where: str) -> None:
    function = Scale().forward
    found = leaves(bound(function, args, kwargs))
    assert dynamic_dims(function, found, {"x": {0: "rows"}, "y": {0: "rows"}}) == {where: {0: "rows"}}
    assert dynamic_dims(function, found, None) == {where: {0: "~x"}}


def total(values: dict[str, Any], *more: torch.Tensor) -> torch.Tensor:
    return torch.cat([values["a"], *values["rest"], *more])


def test_dotted_paths_name_dimensions_inside_of_containers() -> None:
    values = {"a": torch.zeros(2, 3), "rest": [torch.ones(1, 3)]}
    dynamic = {"values.a": {0: "a"}, "values.rest.0": {0: "rest"}, "more.0": {0: "more"}}
    compiled, _ = uncompiled(total, values, torch.ones(1, 3), dynamic=dynamic)
    inputs = [torch.randn(rows, 3) for rows in (5, 2, 4)]
    assert compiled.input_names == ("values.a", "values.rest.0", "more.0")
    assert torch.equal(compiled(*inputs), torch.cat(inputs))


def test_a_dotted_path_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(DynamicShapeError, match=r"'values\.b', but there is no such argument"):
        uncompiled(total, {"a": torch.zeros(2, 3), "rest": []}, dynamic={"values.b": {0: "rows"}})
