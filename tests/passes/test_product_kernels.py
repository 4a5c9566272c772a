"""The product kernels against float64, in Triton's interpreter (see `test_product_interpreted.py`)."""

from __future__ import annotations

import pytest
import torch

from rung.attention.backends.triton_paged import why_no_triton
from rung.passes.ir.activation import gelu_body, silu_body
from rung.passes.kernels.launches import Surroundings, Tiles, activate, add_norm, product, sibling_products
from rung.passes.kernels.projections import linear, linear_norm_linear, norm_linear

pytestmark = [
    pytest.mark.skipif(why_no_triton(torch.device("cpu")) is not None, reason="needs Triton's interpreter"),
    # exp overflows to infinity, whose reciprocal is the 0 that is wanted
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]
TILES = Tiles(block_m=16, block_n=16, block_k=32)
SWAPPED = Tiles(block_m=16, block_n=16, block_k=16, swap=True)
VECTOR = Tiles(block_m=1, block_n=4, block_k=32, num_stages=1)
BODIES = {"": lambda x: x, "silu": silu_body, "gelu": gelu_body}


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", ["", "silu", "gelu"])
@pytest.mark.parametrize("tiles", [TILES, SWAPPED], ids=["plain", "swapped"])
@pytest.mark.parametrize(("rows", "k", "n"), [(0, 32, 16), (3, 48, 10), (17, 40, 7)])
def test_product_with_all_around_it(rows: int, k: int, n: int, tiles: Tiles, activation: str) -> None:
    x, residual = torch.randn(rows, k + 3)[:, :k], torch.randn(rows, n + 5)[:, :n]
    weight, bias = (torch.randn(n * (2 if activation else 1), *more) for more in ((k,), ()))
    found = product(x, weight, Surroundings(bias=bias, residual=residual, activation=activation), tiles)
    close(found, BODIES[activation](x.double() @ weight.double().T + bias.double()) + residual.double())


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize(("k", "n"), [(32, 8), (75, 6)])
def test_one_row_normed_in_its_product(k: int, n: int, activation: str) -> None:
    x, norm_weight, residual = torch.randn(1, k), torch.rand(k), torch.randn(1, n)
    weight = torch.randn(n * (2 if activation else 1), k)
    around = Surroundings(residual=residual, norm_weight=norm_weight, epsilon=1e-5, activation=activation)
    wanted = BODIES[activation](normed(x.double(), norm_weight.double()) @ weight.double().T) + residual.double()
    close(product(x, weight, around, VECTOR), wanted)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("tiles", "rows"), [(TILES, 17), (SWAPPED, 3), (VECTOR, 1)], ids=["plain", "swapped", "vector"])
@pytest.mark.parametrize(("k", "n"), [(32, 16), (43, 10)])
def test_halves_that_lie_apart(tiles: Tiles, rows: int, k: int, n: int, activation: str) -> None:
    x, gate, up = torch.randn(rows, k), torch.randn(n, k), torch.randn(n, k)
    found = product(x, gate, Surroundings(up=up, activation=activation), tiles)
    close(found, BODIES[activation](x.double() @ torch.cat((gate, up)).double().T))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tiles", "rows"), [(TILES, 0), (TILES, 17), (SWAPPED, 3), (VECTOR, 1)])
@pytest.mark.parametrize("sizes", [(32, 16, 16), (10, 33, 4)])
def test_three_products_in_one_launch(tiles: Tiles, rows: int, sizes: tuple[int, ...], biased: bool) -> None:
    x, weights = torch.randn(rows, 43)[:, :40], [torch.randn(n, 40) for n in sizes]
    biases = [torch.randn(n) if biased else None for n in sizes]
    for found, weight, bias in zip(sibling_products(x, weights, biases, tiles), weights, biases, strict=True):
        close(found, torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()))


@pytest.mark.parametrize("k", [128, 40])
def test_parts_of_a_split_product_are_summed_before_the_norm(k: int) -> None:
    x, weight, bias, residual, norm_weight = (torch.randn(*shape) for shape in ((17, k), (24, k), (24,), (17, 24), (24,)))
    parts = product(x, weight, Surroundings(bias=bias), Tiles(block_m=16, block_n=16, block_k=16, splits=4))
    assert parts.shape == (4, 17, 24)
    found, hidden = add_norm(parts, residual, norm_weight, 1e-5, bias)
    wanted = x.double() @ weight.double().T + bias.double() + residual.double()
    close(hidden, wanted)
    close(found, normed(wanted, norm_weight.double()))


def test_norm_without_a_residual() -> None:
    x, weight = torch.randn(3, 40)[:, :33], torch.rand(33)
    found, hidden = add_norm(x, None, weight, 1e-5)
    assert hidden is x
    close(found, normed(x.double(), weight.double()))


def test_activation_alone() -> None:
    x = torch.randn(3, 22)
    close(activate(x, "gelu"), gelu_body(x.double()))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_joined_ops(rows: int) -> None:
    x, weight, bias, residual, norm_weight, after, after_bias = (
        torch.randn(*shape) for shape in ((rows, 24), (12, 24), (12,), (rows, 12), (12,), (20, 12), (20,))
    )
    found, hidden = linear_norm_linear(x, weight, bias, residual, norm_weight, 1e-5, after, after_bias, "silu")
    summed = x.double() @ weight.double().T + bias.double() + residual.double()
    close(hidden, summed)
    wanted = silu_body(normed(summed, norm_weight.double()) @ after.double().T + after_bias.double())
    close(found, wanted)
    close(norm_linear(hidden, norm_weight, 1e-5, after, after_bias, "silu"), wanted)
    close(linear(x, weight, None, ""), x.double() @ weight.double().T)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(17, 40), torch.randn(7, 40)
    before = product(x, weight, Surroundings(), TILES)
    x[5:] = float("nan")
    assert torch.equal(product(x, weight, Surroundings(), TILES)[:5], before[:5])
