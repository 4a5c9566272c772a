"""What providers do for a number of rows: our kernels and torch's, counted on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rung.launch import Rehearsal, TritonLauncher, rehearse_launches
from rung.passes.kernels import fp8, fp8_norm, fp8_siblings, projections, siblings

pytestmark = pytest.mark.filterwarnings("ignore:.*_scaled_mm")
_LOOKS = ("empty", "view", "expand", "squeeze", ".t.", "transpose", "alias", "detach", "reshape")  # that launch nothing


class Launches(Rehearsal):
    def __init__(self) -> None:
        super().__init__(90)
        self.found: list[str] = []

    def launch(self, launcher: TritonLauncher, values: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.found.append(launcher.name + (f" / {named['SPLITS']}" if named.get("SPLITS", 1) > 1 else ""))


class Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(look in str(func) for look in _LOOKS):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def launched(call: Callable[..., Any], *args: Any) -> list[str]:
    with rehearse_launches(90, Launches()) as rehearsal, Operations(rehearsal.found):  # type: ignore[attr-defined]
        call(*args)
    return rehearsal.found  # type: ignore[attr-defined, no-any-return]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def quantised(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(rows, 4096, dtype=torch.float8_e4m3fn), empty(1, dtype=torch.float32)


def weight(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(n, 4096, dtype=torch.float8_e4m3fn), empty(n, dtype=torch.float32)


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (1, ["vector_kernel", "add_norm_kernel"]),
        (64, ["product_kernel / 4", "add_norm_kernel"]),
        (1024, ["mm", "add_norm_kernel"]),
    ],
)
def test_a_sum_and_the_norm_behind_it_are_one_kernel_and_few_rows_split_the_product(rows: int, kernels: list[str]) -> None:
    args = empty(rows, 14336), empty(4096, 14336), None, empty(rows, 4096), empty(4096), 1e-5
    assert launched(projections.linear_norm, *args) == kernels


@pytest.mark.parametrize(("rows", "kernels"), [(1, ["vector_kernel"]), (64, ["product_kernel"]), (1024, ["repeat", "_scaled_mm"])])
def test_rows_with_one_scale_are_multiplied_without_a_kernel_that_spreads_it(rows: int, kernels: list[str]) -> None:
    """Beyond our kernels `_scaled_mm` wants the scale as often as there are rows."""
    assert launched(fp8.linear, *quantised(rows), *weight(4096), None, torch.bfloat16) == kernels


@pytest.mark.parametrize(
    ("rows", "kernels"), [(1, ["sibling_vectors_kernel"]), (64, ["sibling_products_kernel"]), (1024, ["mm", "mm", "mm"])]
)
def test_queries_keys_and_values_are_one_launch_while_rows_are_few(rows: int, kernels: list[str]) -> None:
    weights = [empty(n, 4096) for n in (4096, 1024, 1024)]
    assert launched(siblings.three, empty(rows, 4096), *weights, None, None, None) == kernels


@pytest.mark.parametrize(("rows", "kernels"), [(1, ["vector_kernel"]), (64, ["product_kernel"]), (1024, ["mm", "mm", "activate_kernel"])])
def test_a_gated_product_whose_halves_lie_apart_is_one_launch_while_rows_are_few(rows: int, kernels: list[str]) -> None:
    assert launched(siblings.gated, empty(rows, 4096), empty(14336, 4096), empty(14336, 4096), "silu") == kernels


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(1, ["sibling_vectors_kernel"]), (64, ["sibling_products_kernel"]), (1024, ["clone", "_scaled_mm", "_scaled_mm", "_scaled_mm"])],
)
def test_e4m3_queries_keys_and_values_spread_their_scale_once(rows: int, kernels: list[str]) -> None:
    weights = (part for n in (4096, 1024, 1024) for part in weight(n))
    assert launched(fp8_siblings.three, *quantised(rows), *weights, None, None, None, torch.bfloat16) == kernels


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (1, ["vector_kernel", "quantise_kernel"]),
        (64, ["product_kernel", "quantise_kernel"]),
        (128, ["clone", "_scaled_mm", "_scaled_mm", "quantise_kernel"]),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_an_e4m3_gated_product_is_quantised_by_one_kernel(rows: int, kernels: list[str], static: bool) -> None:
    scale = empty(1, dtype=torch.float32) if static else None
    args = *quantised(rows), *weight(14336), *weight(14336), "silu", scale, torch.bfloat16
    assert launched(fp8_siblings.gated, *args) == kernels


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (1, ["vector_kernel", "add_norm_quantise_kernel"]),
        (64, ["product_kernel / 4", "add_norm_quantise_kernel"]),
        (1024, ["repeat", "_scaled_mm", "add_norm_quantise_kernel"]),
    ],
)
def test_an_e4m3_product_may_be_split_before_sum_norm_and_quantisation(rows: int, kernels: list[str]) -> None:
    args = *quantised(rows), *weight(4096), None, empty(rows, 4096), empty(4096), 1e-5, empty(1, dtype=torch.float32)
    assert launched(fp8_norm.linear_norm, *args) == kernels
