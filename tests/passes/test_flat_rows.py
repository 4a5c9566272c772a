"""Rows with a leading dimension of 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.passes.fusion import FlatRows
from rung.passes.ir import fp8_linear, fp8_quant_per_token
from tests.passes.graphs import run, same, targets, traced

X, Y, W = torch.randn(1, 3, 16), torch.randn(1, 3, 16), torch.rand(16)


def chain(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
    total = x + y
    return torch.ops.rung.silu_and_mul(torch.ops.rung.rms_norm(total, w, 1e-5)), total


def test_a_chain_is_flattened_once_at_its_ends() -> None:
    tensors = {"x": X, "y": Y, "w": W}
    module = traced(chain, **tensors)
    assert run(module, FlatRows()) == {"flat_rows": 3}
    found = targets(module)
    assert (found.count("aten.squeeze.dim"), found.count("aten.unsqueeze.default")) == (2, 2)
    same(module, chain, tensors, rtol=0, atol=0)


def test_views_around_products_vanish() -> None:
    def layer(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        hidden = (x.view(3, 16) @ y).view(1, 3, 16) + x
        return torch.ops.rung.rms_norm(hidden, w, 1e-5).view(3, 16) @ y

    tensors = {"x": X, "y": torch.randn(16, 16), "w": W}
    module = traced(layer, **tensors)
    assert run(module, FlatRows()) == {"flat_rows": 2}
    assert targets(module).count("aten.view.default") == 1  # of x alone
    same(module, layer, tensors, rtol=0, atol=0)


def test_scales_of_rows_are_flattened_with_them() -> None:
    weight, scale = fp8_quant_per_token(torch.randn(32, 16))

    def layer(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> Any:
        return fp8_linear(*fp8_quant_per_token(x), w, s, None, x.dtype)

    tensors = {"x": X, "w": weight, "s": scale.squeeze(1)}
    module = traced(layer, **tensors)
    assert run(module, FlatRows()) == {"flat_rows": 2}
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.rung.fp8_linear.default)
    assert [tuple(arg.meta["val"].shape) for arg in node.args[:2]] == [(3, 16), (3, 1)]
    same(module, layer, tensors)


@pytest.mark.parametrize(
    "x",
    [torch.randn(2, 3, 16), torch.randn(3, 16), torch.randn(1, 16, 3).transpose(1, 2), torch.randn(1, 1, 3, 16)],
    ids=["two", "flat", "strided", "four"],
)
def test_other_rows_are_left_alone(x: torch.Tensor) -> None:
    module = traced(lambda x, w: torch.ops.rung.rms_norm(x, w, 1e-5), x=x, w=W)
    assert run(module, FlatRows()) == {"flat_rows": 0}


def test_a_sum_with_broadcast_rows_is_left_alone() -> None:
    module = traced(lambda x, y: x + y, x=X, y=Y[:, :1])
    assert run(module, FlatRows()) == {"flat_rows": 0}
