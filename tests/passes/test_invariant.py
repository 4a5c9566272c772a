"""Products whose rows have the same bits in every batch; in the interpreter too (see `test_product_interpreted.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.errors import CompileError
from rung.passes.invariant import BatchInvariant, InvariantProducts
from rung.passes.ir import FP8_LINEAR, LINEAR, fp8_quant_per_token
from rung.passes.kernels import invariant
from tests.passes.graphs import run, same, targets, traced

ROWS = (1, 2, 3, 31, 64, 65)
ALONE = (0, 7, 33, 64)  # rows that are looked at
X = torch.randn(65, 96, generator=torch.Generator().manual_seed(1))


def check(product: Any) -> None:
    """`product(first, last)` gives these rows of X; each of them must have the bits that it has alone."""
    alone = {row: product(row, row + 1) for row in ALONE}
    for rows in ROWS:
        first, last = product(0, rows), product(65 - rows, 65)
        for row, wanted in alone.items():
            assert row >= rows or torch.equal(first[row : row + 1], wanted)
            assert row < 65 - rows or torch.equal(last[row - 65 + rows :][:1], wanted)


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, activation: str) -> None:
    weight, bias = (torch.randn(40, 96) * 0.1).to(dtype), torch.randn(40).to(dtype)
    x = X.to(dtype)

    def product(first: int, last: int) -> torch.Tensor:
        result: torch.Tensor = torch.ops.rung.linear(x[first:last], weight, bias, activation, True)
        return result

    check(product)
    torch.testing.assert_close(product(0, 65), LINEAR.body(x, weight, bias, activation), atol=2e-3, rtol=2e-3)
    assert product(0, 0).shape == (0, 20 if activation else 40)


@pytest.mark.parametrize("scales", ["rows", "one", "none"])
def test_e4m3_weights_too(scales: str) -> None:
    values, scale = fp8_quant_per_token(torch.randn(48, 96))
    x: torch.Tensor
    x_scale: torch.Tensor | None
    x, x_scale = fp8_quant_per_token(X) if scales == "rows" else (X, None)
    if scales == "one":
        x, x_scale = (X / 0.02).to(torch.float8_e4m3fn), torch.tensor([0.02])

    def product(first: int, last: int) -> torch.Tensor:
        given = x_scale[first:last] if x_scale is not None and x_scale.dim() == 2 else x_scale
        result: torch.Tensor = torch.ops.rung.fp8_linear(x[first:last], given, values, scale.squeeze(1), None, torch.float32, True)
        return result

    check(product)
    wanted = FP8_LINEAR.body(x, x_scale, values, scale.squeeze(1), None, torch.float32)
    torch.testing.assert_close(product(0, 65), wanted, atol=1e-3, rtol=1e-3)


def test_one_tile_serves_every_number_of_rows() -> None:
    for dtype, size in ((torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)):
        found = invariant.tiles(dtype)
        assert found.splits == 1
        assert (found.block_m + found.block_n) * found.block_k * size * found.num_stages <= 96 * 1024


# --- graphs ----------------------------------------------------------------------------------------------------------------------------


def test_products_of_a_graph_are_told() -> None:
    values, scale = fp8_quant_per_token(torch.randn(16, 96))

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> Any:
        rows, x_scale = fp8_quant_per_token(x)
        return (
            x @ w.T,
            torch.addmm(b, x, w.T),
            torch.ops.rung.linear(x, w, None, ""),
            torch.ops.rung.fp8_linear(rows, x_scale, q, s, None, x.dtype),
        )

    tensors = {"x": X, "w": torch.randn(16, 96), "b": torch.randn(16), "q": values, "s": scale.squeeze(1)}
    module = traced(layer, **tensors)
    assert run(module, BatchInvariant()) == {"products": 4}
    nodes = [node for node in module.graph.nodes if "linear" in str(node.target)]
    assert [node.args[-1] for node in nodes] == [True] * 4
    assert "aten.mm.default" not in targets(module)
    same(module, layer, tensors)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x, w: x @ w, "aten.mm.default"),
        (lambda x, w: torch.bmm(x[None], w[None]), "aten.bmm.default"),
        (lambda x, w: torch.ops.rung.norm_linear(x, x[0], 1e-5, w.T.contiguous(), None, ""), "rung.norm_linear.default"),
    ],
    ids=["untransposed", "batched", "joined"],
)
def test_what_cannot_be_told_is_refused(function: Any, named: str) -> None:
    with pytest.raises(CompileError, match=f"{named} is not batch invariant"):
        BatchInvariant().run(traced(function, x=X, w=torch.randn(96, 8)).graph)


def test_an_outer_product_sums_nothing() -> None:
    module = traced(lambda x, w: torch.bmm(x[None, :, :1], w[None, :1]), x=X, w=torch.randn(96, 8))
    assert run(module, BatchInvariant()) == {"products": 0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 160), nn.Linear(160, 96)
        self.norm = nn.Parameter(torch.rand(96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.ops.rung.rms_norm(x, self.norm, 1e-5)
        result: torch.Tensor = x + self.down(torch.nn.functional.silu(self.up(normed)))
        return result


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_a_wrapped_module_gives_a_row_the_same_bits_over_its_ladder(graphs: str) -> None:
    options: dict[str, Any] = (
        {} if graphs == "none" else {"graphs": graphs, "capture_sizes": (1, 4, 16, 64), "pad": ("rows",), "max_waste": None}
    )
    module = rung.wrap(Net().requires_grad_(False), dynamic={"x": {0: "rows"}}, maximum=65, batch_invariant=True, **options)
    check(lambda first, last: module(X[first:last]))
    assert module.rung.report()[0]["passes"][0]["batch_invariant"] == {"products": 2}
    assert any("linear (batch_invariant" in name for name in module.rung.report()[0]["passes"][0]["lowering"])


def test_eager_products_inside_the_mode() -> None:
    linear = nn.Linear(96, 24)

    def product(first: int, last: int) -> torch.Tensor:
        with InvariantProducts(), torch.no_grad():
            result: torch.Tensor = linear(X[first:last])
            return result

    check(product)
    torch.testing.assert_close(product(0, 65), linear(X))
