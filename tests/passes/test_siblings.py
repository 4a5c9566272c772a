from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rung.passes.fusion import FlatRows, Projections, Siblings, act_mul, rms_norm
from rung.passes.lowering import lower
from tests.passes.graphs import run, same, traced, traced_module
from tests.passes.test_fusions import SIZES, layers

X, BIAS = torch.randn(3, 8), torch.randn(4)
WEIGHTS = {"a": torch.randn(4, 8), "b": torch.randn(4, 8), "c": torch.randn(6, 8), "d": torch.randn(6, 8)}


def takes_all(op: Any, args: Any) -> None:
    return None


def test_the_products_of_a_transformers_layer_meet_their_siblings() -> None:
    module = layers("Llama", torch.float32)
    inputs = [torch.randn(1, 6, size) for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        found = run(graph, rms_norm(), act_mul(), FlatRows(), Siblings(takes_all), Projections(takes_all))
        names = ("linear_three", "linear_gated", "linear_norm", "linear")
        assert [found[name] for name in names] == [1, 1, 2, 0]
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs))
        assert {"linear_three", "linear_gated", "linear_norm"} <= set(lower(graph.graph))  # no provider here: back to the bodies
        graph.recompile()
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs))


@pytest.mark.parametrize("activation", [F.silu, lambda x: F.gelu(x, approximate="tanh")], ids=["silu", "gelu"])
def test_halves_keep_their_order(activation: Callable[..., torch.Tensor]) -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return (x @ b.T) * activation(x @ a.T)

    tensors = {"x": X, "a": WEIGHTS["a"], "b": WEIGHTS["b"]}
    graph = traced(function, **tensors)
    assert run(graph, act_mul(), Siblings(takes_all))["linear_gated"] == 1
    same(graph, function, tensors)


def test_three_with_biases() -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> Any:
        return F.linear(x, a, p), F.linear(x, b, p) + 1, F.linear(x, c, q)

    tensors = {"x": X, **{name: WEIGHTS[name] for name in "abc"}, "p": BIAS, "q": torch.randn(6)}
    graph = traced(function, **tensors)
    assert run(graph, Siblings(takes_all))["linear_three"] == 1
    same(graph, function, tensors)


def test_three_of_one_of_three() -> None:
    """What the first join puts in place of a product is what the second reads."""

    def function(x: torch.Tensor, e: torch.Tensor, f: torch.Tensor, g: torch.Tensor) -> Any:
        first, second, third = x @ e.T, x @ f.T, x @ g.T
        return second @ e.T, second @ f.T, second @ g.T, first, third

    tensors = {"x": X, **{name: torch.randn(8, 8) for name in "efg"}}
    graph = traced(function, **tensors)
    assert run(graph, Siblings(takes_all))["linear_three"] == 2
    graph.graph.lint()
    same(graph, function, tensors)


def _two(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
    return x @ a.T, x @ b.T, c, d


def _four(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
    return x @ a.T, x @ b.T, x @ c.T, x @ d.T


def _other_rows(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
    return F.silu(x @ a.T) * ((x + 1) @ b.T), c, d


def _read_twice(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
    up = x @ b.T
    return F.silu(x @ a.T) * up, up, c, d


def _late_weight(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
    first = x @ a.T
    return first, x @ b.T, x @ (c * first.sum()).T, d


@pytest.mark.parametrize(
    ("function", "miss"),
    [
        (_two, None),
        (_four, None),
        (_other_rows, "linear_gated: the factors are no products of the same rows"),
        (_read_twice, "linear_gated: a factor has other readers"),
        (_late_weight, "linear_three: a weight is computed behind the first product"),
    ],
)
def test_what_stays_apart(function: Callable[..., Any], miss: str | None) -> None:
    graph = traced(function, x=X, **WEIGHTS)
    found = run(graph, act_mul(), Siblings(takes_all))
    assert found["linear_three"] == found["linear_gated"] == 0
    assert [name for name in found if name.startswith("near miss")] == ([] if miss is None else [f"near miss: {miss}"])


def test_without_a_provider_nothing_is_joined() -> None:
    graph = traced(lambda x, a, b, c: (x @ a.T, x @ b.T, x @ c.T), x=X, **{name: WEIGHTS[name] for name in "abc"})
    found = run(graph, Siblings())
    assert found["linear_three"] == 0
    assert found["near miss: linear_three: triton: 'cpu' is no CUDA device"] == 1
