from __future__ import annotations

import pytest
import torch

from rung.passes.ir import fp8_linear, fp8_quant_group, fp8_quant_per_token, fp8_quant_static
from rung.passes.ir.fp8 import E4M3
from rung.passes.ir.fp8_linear import dequantised


def test_rounding_is_that_of_e4m3() -> None:
    x = torch.tensor([1.0, 1.0625, 1.1875, 17.0, 0.001953125, 0.0009])  # ties go to the even neighbour; the last two are subnormal
    values = fp8_quant_static(x, torch.ones(1))
    assert values.dtype == E4M3
    assert values.float().tolist() == [1.0, 1.0, 1.25, 16.0, 0.001953125, 0.0]


def test_values_beyond_the_largest_are_clamped() -> None:
    values = fp8_quant_static(torch.tensor([449.0, 1e9, -1e9, float("inf")]), torch.ones(1))
    assert values.float().tolist() == [448.0, 448.0, -448.0, 448.0]


def test_rows_have_their_own_scale_and_zero_rows_stay_zero() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-20, 0.0, 0.0], [3e4, 1.0, 0.0]])
    values, scales = fp8_quant_per_token(x)
    assert scales.shape == (4, 1)
    assert values[0].float().tolist() == [224.0, -448.0, 112.0]
    assert values[1].float().tolist() == [0.0] * 3
    assert scales.isfinite().all()
    assert (scales > 0).all()
    torch.testing.assert_close(values.float() * scales, x, rtol=0.0625, atol=1e-1)


def test_groups_end_where_they_end() -> None:
    x = torch.ones(2, 8)
    x[0, 3], x[0, 4] = 100.0, 0.01  # the last of one group, the first of the next
    values, scales = fp8_quant_group(x, 4)
    torch.testing.assert_close(scales, torch.tensor([[100.0, 1.0], [1.0, 1.0]]) / 448)
    torch.testing.assert_close(values.float().unflatten(1, (2, 4)) * scales.unsqueeze(2), x.unflatten(1, (2, 4)), rtol=0.0625, atol=0)


def test_a_row_that_no_group_divides_is_refused() -> None:
    with pytest.raises(RuntimeError, match="unflatten"):
        fp8_quant_group(torch.ones(2, 10), 4)


@pytest.mark.parametrize("kind", ["static", "token", "group", "none"])
@pytest.mark.parametrize("rows", [0, 3])
def test_product_is_that_of_the_dequantised(kind: str, rows: int) -> None:
    x, (weight, scale), bias = torch.randn(rows, 256), fp8_quant_per_token(torch.randn(24, 256)), torch.randn(24)
    static = torch.tensor([0.01])
    values, x_scale = {
        "static": lambda: (fp8_quant_static(x, static), static),
        "token": lambda: fp8_quant_per_token(x),
        "group": lambda: fp8_quant_group(x),
        "none": lambda: (x, None),
    }[kind]()
    wide = values.float()
    if x_scale is not None:
        wide = (wide.unflatten(1, (x_scale.shape[-1], -1)) * x_scale.unsqueeze(-1)).flatten(1)
    found = fp8_linear(values, x_scale, weight, scale.squeeze(1), bias, torch.float32)
    torch.testing.assert_close(found, wide @ (weight.float() * scale).T + bias)
    assert fp8_linear(values, x_scale, weight, scale.squeeze(1), bias, torch.bfloat16).dtype == torch.bfloat16


def test_squares_of_a_weight_have_their_scale() -> None:
    weight = torch.ones(256, 384).to(E4M3)
    scale = torch.arange(6.0).view(2, 3)
    wide = dequantised(weight, scale)
    assert torch.equal(wide[::128, ::128], scale)
    assert torch.equal(wide[127::128, 127::128], scale)
