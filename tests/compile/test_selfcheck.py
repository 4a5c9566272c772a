"""The comparison of a piece's two entries with its trace."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rung
from rung import torch_compat
from rung.compile import driver, selfcheck
from rung.compile.piece_compiler import PieceCompiler
from rung.compile.report import CompileReport
from rung.counters import Counters
from rung.errors import InternalError
from rung.passes.ir import linear
from rung.passes.kernels import support
from tests.compile.cases import Block, uncompiled


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


HALF = torch.bfloat16
# Valid functions whose code rounds otherwise than their operations do one by one.
ROUNDED = {
    "softmax of bf16": lambda x: x.to(HALF).softmax(-1).float(),
    "gated product of bf16": lambda x: (torch.nn.functional.silu(x.to(HALF)) * x.to(HALF)).float(),
    "norm of bf16": lambda x: torch.nn.functional.layer_norm(x.to(HALF), (64,)).float().mean(-1),
    "soft cap of float16": lambda x: (torch.tanh(x.half() / 3) * 3).float(),
    "centred rows": lambda x: (x - x.mean(-1, keepdim=True)).mean(-1),
    "sum of a norm": lambda x: torch.nn.functional.layer_norm(x, (64,)).sum(-1),
    "difference of means": lambda x: x.mean() - x.mean(-1).mean(),
    "quantised": lambda x: (x / (x.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8),
    "quantised bf16": lambda x: ((x.to(HALF) * 1.1 + 0.05) * 50).round().to(torch.int8),
    "chosen": lambda x: x.to(HALF).softmax(-1).topk(8).indices,
    "compared": lambda x: (x.to(HALF) * 1.3 + 0.1) * 0.7 > 0.07,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounds_otherwise_is_no_difference(name: str) -> None:
    x = torch.randn(4, 64)
    compiled = rung.compiled(ROUNDED[name], dynamic={"x": {0: "rows"}})
    with compiled.rung.counters.expect(dynamo_traces=1):
        compiled(x)


def _zeros(out: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(out)


def _stale_row(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:-1], out[:1]])


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a hundredth more": lambda out: (out * 1.01).to(out.dtype),
    "zeros": _zeros,
    "rows swapped": lambda out: out.flip(0),
    "a stale row": _stale_row,
    "columns shifted": lambda out: out.roll(1, -1),
    "one element": lambda out: out.flatten().index_fill(0, torch.tensor(3), 99).view_as(out),
}


def _found(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *arguments: torch.Tensor) -> set[str]:
    """Which wrong entries of the function's one piece are found."""
    check, found = selfcheck.check_piece, set()

    def spoil(piece: Any, stock: bytes, entry: Callable[..., Sequence[Any]], weights: Sequence[Any], sizes: Sequence[int]) -> Any:
        for name, change in SPOILT.items():
            try:
                check(piece, stock, lambda given, change=change: [change(out) for out in entry(given)], weights, sizes[-1:])  # type: ignore[misc]
            except InternalError:
                found.add(name)
        return check(piece, stock, entry, weights, sizes)

    monkeypatch.setattr(selfcheck, "check_piece", spoil)
    rung.compiled(function, dynamic={"x": {0: "rows"}})(*arguments)
    return found


COARSE = SPOILT.keys() - {"a hundredth more"}  # where that is one step, or none
WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Collection[str]]] = {
    "norm": (lambda x: torch.nn.functional.layer_norm(x, (64,)).exp(), SPOILT.keys()),
    "small": (lambda x: x.double().softmax(-1) * 1e-9, SPOILT.keys()),
    "bf16": (lambda x: (x.to(HALF) * 1.3 + 0.1).softmax(-1).float(), COARSE),
    "quantised": (lambda x: (x * 50).round().to(torch.int8), COARSE),
    "quantised bf16": (lambda x: ((x.to(HALF) * 1.1 + 0.05) * 50).round().to(torch.int8), COARSE),
    "chosen": (lambda x: (x * 1.3).topk(8).indices, COARSE),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_entries_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, wrong = WRONG[name]
    assert _found(function, monkeypatch, torch.randn(4, 64)) >= wrong


def test_infinities_hide_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).masked_fill(x > 0, float("-inf"))

    assert _found(masked, monkeypatch, torch.randn(4, 64)) == SPOILT.keys()


def test_integers_alone_are_compared_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(9, (4, 64))
    assert _found(lambda x: x * 7 + torch.arange(3, 67), monkeypatch, x) == SPOILT.keys() - {
        "rows swapped",
        "a stale row",
        "a hundredth more",
    }


def _uncompared(counters: Counters) -> dict[str, int]:
    return {name: count for name, count in counters.items() if name.startswith("uncompared_piece")}


class Embedding(torch.nn.Module):
    """Of ids that start at `first`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.table, self.first = torch.nn.Embedding(9, 4), first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids - self.first)


def test_integers_are_ones_where_zeros_are_no_good() -> None:
    ids = torch.tensor([1, 5, 9])
    module = Embedding(1).requires_grad_(False)
    want = module(ids)
    rung.wrap(module, dynamic={"ids": {0: "rows"}})
    assert torch.equal(module(ids), want)
    assert _uncompared(module.rung.counters) == {}  # type: ignore[operator, union-attr, arg-type]


def test_a_graph_that_cannot_take_made_up_values_is_counted_and_not_compared() -> None:
    ids = torch.tensor([2, 5, 9])
    module = Embedding(2).requires_grad_(False)
    want = module(ids)
    rung.wrap(module, dynamic={"ids": {0: "rows"}})
    assert torch.equal(module(ids), want)
    assert _uncompared(module.rung.counters) == {"uncompared_piece.values": 1}  # type: ignore[operator, union-attr, arg-type]


def test_divisors_are_no_zeros() -> None:
    compiled = rung.compiled(lambda lens: 10 // lens, dynamic={"lens": {0: "rows"}})
    assert compiled(torch.tensor([1, 2, 5])).tolist() == [10, 5, 2]
    assert _uncompared(compiled.rung.counters) == {}


def test_an_entry_that_raises_where_the_graph_ran_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check = selfcheck.check_piece

    def fail(given: list[Any]) -> list[Any]:
        raise ZeroDivisionError("of the entry")

    monkeypatch.setattr(selfcheck, "check_piece", lambda piece, stock, entry, *rest: check(piece, stock, fail, *rest))
    with pytest.raises(ZeroDivisionError, match="of the entry"):
        rung.compiled(lambda x: x * 2 + 1)(torch.ones(3))


def test_expanded_arguments_are_compared() -> None:
    compiled = rung.compiled(lambda x: (x + 1).sum(1))
    assert torch.equal(compiled(torch.ones(1, 8).expand(3, 8)), torch.full((3,), 16.0))
    assert _uncompared(compiled.rung.counters) == {}
