"""Kernels that quantise, and products by e4m3 weights, in Triton's interpreter (see `test_product_interpreted.py`).

The interpreter of Triton 3.6 loses the carry of a number that rounding to e4m3 lifts to the next power of two (it becomes half of it). So
the kernels store float32 here, and torch rounds; `tests/gpu/test_fp8.py` tests them as they are. Reading e4m3 is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.attention.backends.triton_paged import why_no_triton
from rung.passes.ir.activation import gelu_body, silu_body
from rung.passes.ir.fp8 import GROUP, quant_group_body, quant_per_token_body, quant_static_body
from rung.passes.ir.fp8_linear import FP8_BLOCK, dequantised, fp8_block_body, fp8_linear_norm_body, fp8_norm_linear_body
from rung.passes.ir.rms_norm import rms_norm_body
from rung.passes.kernels import fp8, fp8_launches, fp8_norm, fp8_product
from rung.passes.kernels.fp8_launches import add_norm_quantise, quantise
from rung.passes.kernels.launches import Surroundings, Tiles, product, sibling_products

pytestmark = [
    pytest.mark.skipif(why_no_triton(torch.device("cpu")) is not None, reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]
TILES = Tiles(block_m=16, block_n=64, block_k=64)
SWAPPED = Tiles(block_m=16, block_n=64, block_k=128, swap=True)
VECTOR = Tiles(block_m=1, block_n=64, block_k=256, num_stages=1)
SPLIT = Tiles(block_m=16, block_n=32, block_k=32, splits=2)
BODIES = {"": lambda x: x, "silu": silu_body, "gelu": gelu_body}
STATIC = torch.tensor([0.004])


@pytest.fixture(autouse=True)
def _rounded_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_launches, "E4M3", torch.float32)


def steps_apart(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """The largest distance in e4m3 numbers: 1 where another order of operations decides a tie."""
    assert found.abs().max() <= 448
    found = found.to(torch.float8_e4m3fn)
    codes = [(x.view(torch.uint8).int() & 127) * torch.where(x.view(torch.uint8) > 127, -1, 1) for x in (found, wanted)]
    return int((codes[0] - codes[1]).abs().max())


def wanted_of(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "static":
        return quant_static_body(x, STATIC), STATIC.expand(x.shape[0], 1)
    return quant_group_body(x, GROUP) if kind == "group" else quant_per_token_body(x)


@pytest.mark.parametrize("kind", ["static", "token", "group"])
@pytest.mark.parametrize("activation", ["", "silu", "gelu"])
def test_rows_are_quantised_as_the_op_says(kind: str, activation: str) -> None:
    n = 384
    x = torch.randn(3, n * (2 if activation else 1) + 5)[:, :-5] * 3
    x[1] = 0
    x[2, :7] = 1e4  # beyond the static scale
    values, scale = quantise(x, STATIC if kind == "static" else None, GROUP if kind == "group" else 0, activation=activation)
    wanted, scales = wanted_of(BODIES[activation](x), kind)
    torch.testing.assert_close(scale, scales, rtol=1e-5, atol=0)
    assert steps_apart(values, wanted) <= 1
    assert values[1].float().abs().max() == 0
    if not activation:
        assert values[2, :7].float().tolist() == [448.0] * 7


@pytest.mark.parametrize("kind", ["static", "token", "group"])
@pytest.mark.parametrize("parts", [0, 3])
def test_norm_and_quantisation_in_one(kind: str, parts: int) -> None:
    x, residual, weight, bias = torch.randn(4, 256), torch.randn(4, 256), torch.rand(256), torch.randn(256)
    given, left = (torch.stack([x * share for share in (0.5, 0.25, 0.25)]), bias) if parts else (x, None)
    found, hidden = add_norm_quantise(
        given, residual, weight, 1e-5, STATIC if kind == "static" else None, GROUP if kind == "group" else 0, left
    )
    summed = x + (bias if parts else 0) + residual
    torch.testing.assert_close(hidden, summed)
    wanted, scales = wanted_of(rms_norm_body(summed, weight, 1e-5), kind)
    torch.testing.assert_close(found.scale, scales, rtol=1e-5, atol=0)
    assert steps_apart(found.values, wanted) <= 1


def weight_of(n: int, k: int, squares: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = quant_per_token_body(torch.randn(n, k))
    return values, torch.rand(n // GROUP, k // GROUP) if squares else scale.squeeze(1)


@pytest.mark.parametrize(("tiles", "rows"), [(TILES, 3), (SWAPPED, 17), (VECTOR, 1)], ids=["plain", "swapped", "vector"])
@pytest.mark.parametrize("squares", [False, True], ids=["outputs", "squares"])
@pytest.mark.parametrize("activation", ["", "silu"])
def test_product_by_an_e4m3_weight(tiles: Tiles, rows: int, squares: bool, activation: str) -> None:
    x, bias = torch.randn(rows, 256) * 0.1, torch.randn(256)  # two squares each way
    weight, scale = weight_of(256, 256, squares)
    found = product(x, weight, Surroundings(bias=bias, weight_scale=scale, activation=activation), tiles)
    wanted = BODIES[activation](x.double() @ dequantised(weight, scale).double().T + bias.double())
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("tiles", "rows"), [(TILES, 3), (SWAPPED, 17)], ids=["plain", "swapped"])
@pytest.mark.parametrize("squares", [False, True], ids=["outputs", "squares"])
@pytest.mark.parametrize("activation", ["", "silu"])
def test_product_of_e4m3_rows(tiles: Tiles, rows: int, squares: bool, activation: str) -> None:
    (weight, scale), (x, x_scale) = weight_of(256, 256, squares), wanted_of(torch.randn(rows, 256) * 0.1, "group" if squares else "token")
    around = Surroundings(x_scale=x_scale.t().contiguous().t(), weight_scale=scale, activation=activation)
    found = product(x, weight, around, tiles)
    assert found.dtype == torch.bfloat16
    wide = x.double().unflatten(1, (x_scale.shape[1], -1)) * x_scale.unsqueeze(2)
    wanted = BODIES[activation](wide.flatten(1) @ dequantised(weight, scale).double().T)
    assert (found.double() - wanted).norm() <= 1.5e-2 * wanted.norm()  # the interpreter cuts to bf16


@pytest.mark.parametrize(("tiles", "rows"), [(TILES, 3), (SWAPPED, 17), (VECTOR, 1)], ids=["plain", "swapped", "vector"])
@pytest.mark.parametrize("one", [False, True], ids=["a scale a row", "one scale"])
def test_siblings_of_e4m3_rows(tiles: Tiles, rows: int, one: bool) -> None:
    x, x_scale = wanted_of(torch.randn(rows, 256) * 0.1, "token")
    x_scale = x_scale[:1].expand(rows, 1) if one else x_scale
    products = [weight_of(n, 256, squares=False) for n in (64, 40, 17)]
    found = sibling_products(x, [weight for weight, _ in products], [None] * 3, tiles, x_scale, [scale for _, scale in products])
    for part, (weight, scale) in zip(found, products, strict=True):
        wanted = (x.double() * x_scale) @ dequantised(weight, scale).double().T
        assert part.dtype == torch.bfloat16
        assert (part.double() - wanted).norm() <= 1.5e-2 * wanted.norm()  # the interpreter cuts to bf16


@pytest.mark.parametrize(("tiles", "rows"), [(TILES, 3), (SWAPPED, 17), (VECTOR, 1)], ids=["plain", "swapped", "vector"])
def test_halves_of_e4m3_that_lie_apart(tiles: Tiles, rows: int) -> None:
    x, x_scale = wanted_of(torch.randn(rows, 256) * 0.1, "token")
    (gate, gate_scale), (up, up_scale) = weight_of(96, 256, squares=False), weight_of(96, 256, squares=False)
    around = Surroundings(x_scale=x_scale, weight_scale=gate_scale, up=up, up_scale=up_scale, activation="silu")
    weight = torch.cat((dequantised(gate, gate_scale), dequantised(up, up_scale))).double()
    wanted = BODIES["silu"]((x.double() * x_scale) @ weight.T)
    assert (product(x, gate, around, tiles).double() - wanted).norm() <= 1.5e-2 * wanted.norm()


def test_an_activation_of_two_tensors_is_quantised() -> None:
    both = torch.randn(3, 80)
    apart = quantise(both[:, :40].clone(), STATIC, 0, activation="gelu", up=both[:, 40:].clone())
    joined = quantise(both, STATIC, 0, activation="gelu")
    assert torch.equal(apart.values.float(), joined.values.float())
    assert torch.equal(apart.scale, joined.scale)


def test_parts_of_a_split_product_are_scaled() -> None:
    x, (weight, scale) = torch.randn(3, 64), weight_of(32, 64, squares=False)
    parts = product(x, weight, Surroundings(weight_scale=scale), SPLIT)
    torch.testing.assert_close(parts.sum(0), x @ dequantised(weight, scale).T, atol=1e-4, rtol=1e-4)


def test_a_scale_that_was_expanded_is_read_once_for_each_output() -> None:
    """The kernels walk along scales as if each had memory of its own."""
    x, x_scale = wanted_of(torch.randn(3, 256) * 0.1, "token")
    weights = [weight_of(n, 256, squares=False)[0] for n in (64, 64, 64)]
    one = torch.stack((torch.tensor(0.5), torch.tensor(float("nan"))))[:1].expand(64)
    wanted = [0.5 * (x.double() * x_scale) @ weight.double().T for weight in weights]
    apart = Surroundings(x_scale=x_scale, weight_scale=one, up=weights[1], up_scale=one, activation="silu")
    found = [
        product(x, weights[0], Surroundings(x_scale=x_scale, weight_scale=one), TILES),
        product(x, weights[0], apart, TILES),
        *sibling_products(x, weights, [None] * 3, TILES, x_scale, [one] * 3),
    ]
    for part, expected in zip(found, (wanted[0], BODIES["silu"](torch.cat(wanted[:2], 1)), *wanted), strict=True):
        assert (part.double() - expected).norm() <= 1.5e-2 * expected.norm()


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("static", [False, True, "1 x 1"])
def test_sum_norm_and_quantisation_of_few_rows(monkeypatch: pytest.MonkeyPatch, rows: int, static: bool | str) -> None:
    monkeypatch.setattr(fp8_product, "tiles_for", lambda *args, splittable, **named: VECTOR if rows < 2 else SPLIT)
    x, x_scale = wanted_of(torch.randn(rows, 64), "token")
    x_scale = torch.full((1, 1) if static == "1 x 1" else (1,), 0.01) if static else x_scale
    bias, residual, norm_weight = torch.randn(32), torch.randn(rows, 32), torch.rand(32)
    args = x, x_scale, *weight_of(32, 64, squares=False), bias, residual, norm_weight, 1e-5, STATIC if static else None
    values, scales, hidden = fp8_norm.linear_norm(*args)
    wanted_values, wanted_scales, wanted = fp8_linear_norm_body(*args)
    torch.testing.assert_close(hidden, wanted, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(scales, wanted_scales, atol=0, rtol=1e-2)
    assert values.shape == wanted_values.shape
    difference = values.to(torch.float8_e4m3fn).float() * scales - wanted_values.float() * wanted_scales
    assert difference.norm() <= 5e-2 * (wanted_values.float() * wanted_scales).norm() + 1e-6


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_block_of_few_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(fp8_product, "tiles_for", lambda *args, splittable, **named: VECTOR if rows < 2 else SPLIT if splittable else TILES)
    assert FP8_BLOCK.sample is not None
    args = FP8_BLOCK.sample(rows, torch.float32, torch.device("cpu"))
    for found, wanted in zip(fp8.block(*args), fp8_block_body(*args), strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).norm() <= 6e-2 * wanted.norm()


def given_as_e4m3(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a block whose x is e4m3 already, as attention writes it."""
    scale = args[0].abs().max().reshape(1) / 400
    return quant_static_body(args[0], scale), *args[1:3], scale, *args[4:]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_block_of_few_rows_that_come_as_e4m3(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(fp8_product, "tiles_for", lambda *args, splittable, **named: VECTOR if rows < 2 else SPLIT if splittable else TILES)
    assert FP8_BLOCK.sample is not None
    args = given_as_e4m3(FP8_BLOCK.sample(max(rows, 1), torch.float32, torch.device("cpu")))
    args = (args[0][:rows], *args[1:5], args[5][:rows], *args[6:])
    for found, wanted in zip(fp8.block(*args), fp8_block_body(*args), strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).norm() <= 6e-2 * wanted.norm()


def multiplied(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, by: torch.Tensor, bias: Any, dtype: Any) -> torch.Tensor:
    """`torch_compat.scaled_mm` in float32."""
    wide = x.to(torch.float8_e4m3fn).float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(2)
    return torch.nn.functional.linear(wide.flatten(1), dequantised(weight, by), bias)


def test_block_of_many_rows_quantises_behind_norms_and_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []

    def scaled_mm(x: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(x.shape)
        return multiplied(x, *args)

    monkeypatch.setattr(fp8_product, "scaled_mm", scaled_mm)
    monkeypatch.setattr(fp8_product, "tiles_for", lambda *args, **named: None)
    assert FP8_BLOCK.sample is not None
    args = FP8_BLOCK.sample(5, torch.float32, torch.device("cpu"))
    for found, wanted in zip(fp8.block(*args), fp8_block_body(*args), strict=True):
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()  # ties apart, the same roundings
    assert calls == [(5, 320), (5, 192), (5, 320), (5, 192)]


def test_block_of_many_rows_that_come_as_e4m3_are_given_their_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_product, "scaled_mm", multiplied)
    monkeypatch.setattr(fp8_product, "tiles_for", lambda *args, **named: None)
    assert FP8_BLOCK.sample is not None
    args = given_as_e4m3(FP8_BLOCK.sample(5, torch.float32, torch.device("cpu")))
    for found, wanted in zip(fp8.block(*args), fp8_block_body(*args), strict=True):
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("k", [512, 256])
def test_squares_of_many_rows(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """cuBLAS takes the scales of squares four at a time; other weights are multiplied in the model's dtype."""
    monkeypatch.setattr(fp8_product, "scaled_mm", multiplied)
    monkeypatch.setattr(fp8_product, "tiles_for", lambda *args, **named: None)
    monkeypatch.setattr(fp8_product, "dequantised", lambda weight: dequantised(weight.values, weight.scale))
    args = torch.randn(5, k), torch.rand(k), 1e-5, *weight_of(128, k, squares=True), None, None, "silu", GROUP
    found, wanted = fp8.norm_linear(*args), fp8_norm_linear_body(*args)
    assert (found - wanted).norm() <= (1e-2 if k == 512 else 6e-2) * wanted.norm()
