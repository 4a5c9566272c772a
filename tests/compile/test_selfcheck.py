"""The comparison of a piece's two entries."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import rung
from rung import torch_compat
from rung.compile import driver, selfcheck
from rung.compile.piece_compiler import PieceCompiler
from rung.compile.report import CompileReport
from rung.compile.selfcheck import _agree, _copy
from rung.counters import Counters
from rung.passes.ir import linear
from rung.passes.kernels import support
from tests.compile.cases import Block, uncompiled


def test_copies_keep_the_layout_that_a_piece_was_compiled_for() -> None:
    wide = torch.randn(3, 64)
    view = wide[:, :32].unsqueeze(1)
    copy = _copy(view)
    assert copy.stride() == view.stride() != view.clone().stride()
    assert torch.equal(copy, view)
    assert copy.data_ptr() != view.data_ptr()


def test_what_is_rounded_to_e4m3_may_differ_by_its_steps() -> None:
    want = torch.randn(64)
    assert not _agree(want, want * 1.05, 0.0)
    assert _agree(want, want * 1.05, 0.1)
    assert not _agree(want, want * 1.2, 0.1)


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(128, 64, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or torch_compat.triton_interpreted(), reason="needs Triton")
def test_the_kernels_of_a_comparison_are_found_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_why_not_device", lambda device: None)
    noted: list[set[str]] = []

    def check(
        cases: list[selfcheck.Case], report: CompileReport, counters: Counters, device: torch.device, compiler: PieceCompiler
    ) -> None:
        rehearsal = selfcheck.find_kernels(cases, 90)
        noted.extend({launcher.name} for launcher, _, _ in rehearsal.wanted.values())

    monkeypatch.setattr(driver, "check_pieces", check)
    module = Product()
    rung.wrap(module, dynamic={"x": {0: "rows"}})
    module.rung._entry.prepare_call(torch.randn(4, 64, dtype=torch.bfloat16))  # type: ignore[operator, union-attr]
    assert noted == [{"vector_kernel"}, {"product_kernel"}]  # one row, and three


def test_a_plan_runs_on_the_gpu_that_any_tensor_lies_on() -> None:
    """A function without parameters too, and one whose first argument lies on the host."""
    host, gpu = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=torch.device("cuda", 1))
    assert driver._device([host, gpu], None) == gpu.device  # type: ignore[list-item]
    assert driver._device([host], Product()) == host.device  # type: ignore[list-item]
    assert driver._device([], Product()) == torch.device("cpu")
    assert driver._device([], None) == torch.device("cpu")


def test_a_compiled_function_lies_on_the_gpu_of_any_weight_or_argument() -> None:
    """Its variants are built for it."""
    compiled, _ = uncompiled(Block().forward, torch.zeros(3, 8))
    assert compiled.device == torch.device("cpu")
    path, spec = compiled.plan.tensors[0]
    compiled.plan = replace(compiled.plan, tensors=((path, replace(spec, device="cuda")),))
    assert compiled.device == torch.device("cuda")


def test_a_comparison_is_told_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be read from weights: a piece may have none."""
    given: list[torch.device] = []
    monkeypatch.setattr(driver, "check_pieces", lambda cases, report, counters, device, compiler: given.append(device))
    rung.wrap(lambda x: x * 2 + 1, dynamic={"x": {0: "rows"}})(torch.ones(3))
    assert given == [torch.device("cpu")]
