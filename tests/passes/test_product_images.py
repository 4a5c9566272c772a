"""The images of product kernels for sizes that Triton makes constants of; no device is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.cache import Store
from rung.launch import TritonLauncher, rehearse_launches
from rung.passes.kernels import launches, projections, siblings
from rung.torch_compat import triton_interpreted, why_no_triton_export

pytestmark = pytest.mark.skipif(triton_interpreted() or why_no_triton_export() is not None, reason="needs Triton's compiler")


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def linear(x: torch.Tensor) -> Any:
    return projections.linear(x, empty(1, x.shape[1]), None, "")


def gated(x: torch.Tensor) -> Any:
    return projections.linear(x, empty(2, x.shape[1]), None, "silu")


def three(x: torch.Tensor) -> Any:
    return siblings.three(x, *(empty(n, x.shape[1]) for n in (1, 16, 1)), None, None, None)


@pytest.mark.parametrize("call", [linear, gated, three])
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (3, 64), (3, 1)])
def test_a_single_output_or_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Callable[..., Any], rows: int, k: int) -> None:
    for name in ("PRODUCT", "VECTOR", "SIBLING_PRODUCTS", "SIBLING_VECTORS"):
        known = getattr(launches, name)
        monkeypatch.setattr(launches, name, TritonLauncher(known.module, known.name, store=Store(tmp_path)))
    with rehearse_launches(90) as rehearsal:
        call(empty(rows, k))
    assert rehearsal.build().compiled == 1
