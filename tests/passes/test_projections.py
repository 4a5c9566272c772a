from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from rung import torch_compat
from rung.models.llama import LlamaMLP, RMSNorm
from rung.models.random import SHAPES
from rung.passes.fusion import FlatRows, Projections, act_mul, rms_norm
from rung.passes.fusion.projections import takes
from rung.passes.ir import IROp, fp8_quant_static
from rung.passes.lowering import lower
from tests.passes.graphs import run, same, traced, traced_module
from tests.passes.test_fusions import SIZES, layers

TINY = SHAPES["tiny"]


class Block(nn.Module):
    """What lies between two attentions. `case` leaves out or adds what a join needs."""

    def __init__(self, case: str = "") -> None:
        super().__init__()
        self.case = case
        self.o_proj = nn.Linear(64, 64, bias=False)
        self.norm = RMSNorm(64, 1e-5)
        self.mlp = LlamaMLP(TINY)
        self.next_norm = RMSNorm(64, 1e-5)
        self.qkv_proj = nn.Linear(64, 96)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projected = self.o_proj(x)
        residual = projected * 2 + residual if self.case == "product is scaled" else projected + residual
        normed = self.norm(residual)
        early = residual * 3 if self.case == "sum is used early" else residual
        residual = self.mlp(normed) + residual
        query = self.qkv_proj(self.next_norm(residual))
        return query, residual, normed if self.case == "norm is used" else early


def joined(
    block: Block, why_not: Callable[[IROp, tuple[object, ...]], str | None]
) -> tuple[fx.GraphModule, dict[str, int], list[torch.Tensor]]:
    """The block as a piece reaches the passes, after the pass; what that reports; and the weights, which are the piece's arguments."""
    names = [name for name, _ in block.named_parameters()]
    weights = [weight.detach() for weight in block.parameters()]

    def piece(x: torch.Tensor, residual: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = torch.func.functional_call(block, dict(zip(names, given, strict=True)), (x, residual))
        return result

    mode = FakeTensorMode()
    inputs = [mode.from_tensor(tensor) for tensor in (torch.empty(3, 64), torch.empty(3, 64), *weights)]
    traced = torch_compat.trace_body(piece, inputs)
    report = Projections(why_not).run(traced.graph)
    traced.recompile()
    return traced, report, weights


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        ("", {"linear_norm_linear": 2, "norm_linear": 0, "linear_norm": 0, "linear": 0}),
        ("product is scaled", {"linear_norm_linear": 1, "norm_linear": 1, "linear_norm": 0, "linear": 1}),
        (
            "norm is used",
            {
                "linear_norm_linear": 1,
                "norm_linear": 0,
                "linear_norm": 1,
                "linear": 1,
                "near miss: a norm before a product has other users": 1,
            },
        ),
        (
            "sum is used early",
            {
                "linear_norm_linear": 1,
                "norm_linear": 1,
                "linear_norm": 0,
                "linear": 1,
                "near miss: the sum before a norm is used before the product behind the norm": 1,
            },
        ),
    ],
)
def test_joined_block_means_the_same(case: str, counts: dict[str, int]) -> None:
    block = Block(case)
    piece, report, weights = joined(block, lambda op, args: None)
    assert report == counts
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    with torch.no_grad():
        wanted = block(x, residual)
        for result, expected in zip(piece(x, residual, *weights), wanted, strict=True):
            torch.testing.assert_close(result, expected)
        lowered = lower(piece.graph)  # without a provider on this device, back to the bodies
        assert set(lowered) <= {"linear_norm_linear", "norm_linear", "linear_norm", "linear", "rms_norm"}
        piece.recompile()
        for result, expected in zip(piece(x, residual, *weights), wanted, strict=True):
            torch.testing.assert_close(result, expected)


def test_without_a_provider_the_graph_stays_and_the_report_says_why() -> None:
    piece, report, _ = joined(Block(), takes)
    assert report["linear_norm_linear"] == report["norm_linear"] == report["linear"] == 0
    assert report["near miss: linear_norm_linear: triton: 'cpu' is no CUDA device"] == 2
    assert lower(piece.graph) == {"rms_norm": 2, "silu_and_mul": 1}


def test_rows_of_a_transformers_layer_meet_their_products() -> None:
    """Its products are apart (queries, keys, values, gate, up), so each norm has several readers, and goes with what stands before it."""
    module = layers("Llama", torch.float32)
    inputs = [torch.randn(1, 6, size) for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        run(graph, rms_norm(), act_mul())
        assert Projections(lambda op, args: None).run(graph.graph)["linear"] == 7
        flat = traced_module(module, *inputs)
        found = run(flat, rms_norm(), act_mul(), FlatRows())
        assert found["flat_rows"] == 6  # three norms, two sums, an activation
        report = run(flat, Projections(lambda op, args: None))
        assert {name: count for name, count in report.items() if count} == {
            "linear_norm": 2,  # of attention's output and of the MLP
            "linear": 5,
            "near miss: a norm before a product has other users": 5,
        }
        flat.recompile()
        torch.testing.assert_close(flat(*inputs, *module.parameters()), module(*inputs))


def test_joined_projections_of_a_transformers_layer_are_found_between_its_views() -> None:
    """A layer with one projection for gate and up, as Phi-3 has it, and one for queries, keys and values."""
    module = layers("Phi3", torch.float32, pad_token_id=0)
    inputs = [torch.randn(1, 6, size) for size in (SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"])]
    with torch.no_grad():
        graph = traced_module(module, *inputs)
        report = run(graph, rms_norm(), act_mul(), FlatRows(), Projections(lambda op, args: None))
        assert {name: report[name] for name in ("linear_norm_linear", "norm_linear", "linear_norm", "linear")} == {
            "linear_norm_linear": 1,  # o_proj, the sum, the norm, gate and up
            "norm_linear": 1,  # the norm, queries, keys and values
            "linear_norm": 1,  # down_proj, the sum, the last norm
            "linear": 0,
        }
        torch.testing.assert_close(graph(*inputs, *module.parameters()), module(*inputs))


def test_a_sum_that_others_read_before_the_norm_is_computed_where_it_stood() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ w.T + r
        early = hidden * 3
        normed = torch.ops.rung.rms_norm(hidden, scale, 1e-5)
        return early, normed, hidden

    tensors = {"x": torch.randn(3, 8), "w": torch.randn(6, 8), "r": torch.randn(3, 6), "scale": torch.randn(6)}
    graph = traced(function, **tensors)
    assert run(graph, Projections(lambda op, args: None))["linear_norm"] == 1
    same(graph, function, tensors)
    assert lower(graph.graph) == {"linear_norm": 1}
    graph.recompile()
    same(graph, function, tensors)


@pytest.mark.parametrize("case", ["weight comes late", "norm is quantised"])
def test_a_sum_and_norm_stay_apart(case: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, scale: torch.Tensor) -> Any:
        hidden = x @ w.T + r
        if case == "weight comes late":
            return torch.ops.rung.rms_norm(hidden, scale + hidden.sum(), 1e-5)
        return fp8_quant_static(torch.ops.rung.rms_norm(hidden, scale, 1e-5), scale[:1]), hidden

    tensors = {"x": torch.randn(3, 8), "w": torch.randn(6, 8), "r": torch.randn(3, 6), "scale": torch.rand(6)}
    graph = traced(function, **tensors)
    report = run(graph, Projections(lambda op, args: None))
    assert report["linear_norm"] == 0
    assert report.get("near miss: the weight of a norm is computed behind the sum", 0) == (case == "weight comes late")
