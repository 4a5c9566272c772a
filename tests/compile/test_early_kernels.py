"""Images of our own kernels that are begun in the midst of a compile."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import rung
from rung import torch_compat
from rung.compile import driver, selfcheck
from rung.compile.early_kernels import EarlyKernels
from rung.compile.piece_compiler import PieceCompiler
from rung.compile.report import CompileReport
from rung.counters import Count, Counters
from rung.passes.ir import linear
from rung.passes.kernels import support

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None or torch_compat.triton_interpreted(), reason="needs Triton")


class Layer(torch.nn.Module):
    """Nothing but operations of ours: what Inductor makes for a CPU cannot run on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False) for shape in ((96, 128), (128, 96))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(linear(x, self.first), self.second)


class Begun:
    """Workers that note what they are asked for and fail."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, ...]] = []

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        self.jobs.append(arguments)
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("no worker"))
        return future


def test_operations_name_the_kernels_that_the_compiled_piece_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_why_not_device", lambda device: None)
    workers, counters, noted = Begun(), Counters(), []
    monkeypatch.setattr(EarlyKernels, "of", lambda device, sizes, _: EarlyKernels(90, workers.submit, sizes, counters))

    def check(cases: list[selfcheck.Case], report: CompileReport, _: Counters, device: torch.device, compiler: PieceCompiler) -> None:
        noted.append((report.kernels_built, selfcheck.find_kernels(cases, 90).wanted))

    monkeypatch.setattr(driver, "check_pieces", check)
    module = Layer()
    rung.wrap(module, dynamic={"x": {0: "rows"}})
    module.rung._entry.prepare_call(torch.randn(4, 128, dtype=torch.bfloat16))  # type: ignore[operator, union-attr]
    ((built, wanted),) = noted
    assert not built  # the workers failed, so the comparison looks for itself
    begun = {(module, name, specialisation.identity, tuple(options.items())) for module, name, specialisation, options, _ in workers.jobs}
    assert begun == set(wanted)
    assert len(begun) >= 2
    assert not counters[Count.UNFORESEEN_KERNELS]


@rung.eager_break
def host(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Model(torch.nn.Module):
    """A small piece, then a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(host(x + 1).to(torch.bfloat16)) * 2


def test_the_largest_piece_is_compiled_first_and_reports_keep_the_order_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    see = EarlyKernels.see
    monkeypatch.setattr(EarlyKernels, "see", lambda early, index, graph: (seen.append(index), see(early, index, graph)))
    reports, orders = [], []
    for early in (True, False):
        workers, counters = Begun(), Counters()
        made = EarlyKernels(90, workers.submit, (1, 3), counters) if early else None
        monkeypatch.setattr(EarlyKernels, "of", lambda device, sizes, _, made=made: made)
        module = Model()
        rung.wrap(module, dynamic={"x": {0: "rows"}})
        module.rung._entry.prepare_call(torch.randn(4, 128))  # type: ignore[operator, union-attr]
        reports.append(module.rung.report()[0]["passes"])  # type: ignore[operator, union-attr]
        orders.append(list(seen))
    assert orders == [[1, 0], [1, 0]]  # nobody looks the second time
    assert reports[0] == reports[1]
    assert len(reports[0]) == 2
    assert reports[0][0] != reports[0][1]
