"""Blocks of autocast, gradient and inference mode inside of a traced function, with compiled pieces and cuts between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rung
from tests.compile.cases import TOY_OPS, assert_same, double


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def whole(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


def switched_off(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        return x @ x.t()


def across_cuts(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = double(x @ x.t())
        z = y @ y
        with torch.autocast("cpu", enabled=False):
            off = double(x)
            off = off @ off.t()
        last = off @ x
    return y, z, off, last, x @ x.t()


@rung.eager_break(out=lambda x: x.new_empty(x.shape[0], x.shape[0], dtype=torch.bfloat16))
def gram(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t()


def around_a_break(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = gram(x + 1)
    return y, y.float() @ x


def other_modes(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = double(x)
    with torch.enable_grad():
        return double(y) + 1


FUNCTIONS = {
    whole: ["piece_00"],
    switched_off: ["piece_00"],
    across_cuts: ["piece_00", "double_00", "piece_01", "double_01", "piece_02"],
    around_a_break: ["piece_00", "gram_00", "piece_01"],
    other_modes: ["double_00", "piece_00"],
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_equals_eager_mode_cold_and_warm(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 8)
    for source in ("compiled", "loaded"):
        wrapped = rung.wrap(function, dynamic={}, split_ops=TOY_OPS)
        assert_same(wrapped(x), function(x))
        (report,) = wrapped.rung.report()
        assert (report["source"], report["steps"]) == (source, FUNCTIONS[function]), report["reason"]
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()


def test_settings_of_a_block_are_part_of_a_piece() -> None:
    """Two functions that differ in nothing else, with one store."""

    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return x @ x.t()

    x = torch.randn(3, 8)
    for function in (whole, half):
        assert_same(rung.wrap(function, dynamic={})(x), function(x))
