from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from rung.passes.fusion.residual_add import ResidualAdd

aten = torch.ops.aten
X, W, RESIDUAL, BIAS = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (4, 5), (3, 5), (5,)))


def traced(function: Callable[..., torch.Tensor]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(X, W, RESIDUAL, BIAS)


def sums(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=aten.add.Tensor))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, r, b: x @ w + r,
        lambda x, w, r, b: r + x @ w,
        lambda x, w, r, b: torch.relu((x @ w + r) * 2) + r,
    ],
    ids=["behind", "before", "used"],
)
def test_a_residual_is_added_behind_the_product(function: Callable[..., torch.Tensor]) -> None:
    module = traced(function)
    before = sums(module)
    assert ResidualAdd("cpu").run(module.graph) == {"mm + residual": 1}
    module.recompile()
    assert sums(module) == before - 1
    for dtype in (torch.float64, torch.bfloat16):
        values = [value.to(dtype) for value in (X, W, RESIDUAL, BIAS)]
        assert torch.equal(module(*values), function(*values))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, r, b: x @ w + b,
        lambda x, w, r, b: torch.add(x @ w, r, alpha=2),
        lambda x, w, r, b: (x @ w).relu() + r,
        lambda x, w, r, b: (p := x @ w) + r + p,
        lambda x, w, r, b: x @ w + 1,
        lambda x, w, r, b: x @ w + r.float(),
    ],
    ids=["bias", "scaled", "not_a_product", "used_twice", "number", "other_dtype"],
)
def test_other_sums_are_left_alone(function: Callable[..., torch.Tensor]) -> None:
    module = traced(function)
    before = str(module.graph)
    assert ResidualAdd("cpu").run(module.graph) == {"mm + residual": 0}
    assert str(module.graph) == before


def test_another_device_is_left_alone() -> None:
    module = traced(lambda x, w, r, b: x @ w + r)
    assert ResidualAdd().run(module.graph) == {"mm + residual": 0}


def test_the_identity_covers_the_device() -> None:
    assert ResidualAdd("cpu").uuid() == ResidualAdd("cpu").uuid()
    assert ResidualAdd("cpu").uuid() != ResidualAdd("cuda").uuid()
