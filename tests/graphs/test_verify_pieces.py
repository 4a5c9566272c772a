"""Compiled pieces against their traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.compile.build import SplitGraph
from rung.compile.compiled import CompiledFunction
from rung.compile.retrace import traced_pieces
from rung.errors import StateError
from rung.graphs.verify_pieces import compare_pieces


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.steps = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            x = self.linear(x).sin()
            x = torch.ops.rung_test.double(x)
        return x * 2


library = torch.library.Library("rung_test", "FRAGMENT")
library.define("double(Tensor x) -> Tensor")
library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("rung_test::double", lambda x: torch.empty_like(x), lib=library)


@pytest.fixture
def made() -> tuple[Any, CompiledFunction, SplitGraph]:
    net = Net().requires_grad_(False)
    module = rung.wrap(net, dynamic={"x": {0: "rows"}}, split_ops=("rung_test::double",))
    entry = module.rung._entry
    variant, _ = entry.prepare_call(torch.randn(3, 8))
    return entry.config, variant.compiled, traced_pieces(entry.function, {"x": torch.randn(3, 8)}, entry.config, variant.compiled.plan)


def test_every_unique_piece_agrees(made: Any) -> None:
    _, compiled, traced = made
    found = compare_pieces(compiled, traced, [torch.randn(5, 8)])
    assert [(piece.step, piece.uses) for piece in found] == [("piece_00", 2), ("piece_02", 1)]
    assert all(piece.error <= piece.tolerance == 1e-4 for piece in found)


def test_the_step_that_differs_most_is_named(made: Any) -> None:
    _, compiled, traced = made

    def wrong(step: Any) -> Any:
        return dataclasses.replace(step, call=lambda inputs: [step.call(inputs)[0] + 0.01]) if step.name == "piece_01" else step

    walk = compiled._walks[False]
    compiled._walks[False] = dataclasses.replace(walk, bound=tuple(map(wrong, walk.bound)))
    first, last = compare_pieces(compiled, traced, [torch.randn(5, 8)])
    assert (first.step, first.uses) == ("piece_01", 2)
    assert first.error > first.tolerance
    assert last.error <= last.tolerance


def test_a_module_that_changed_since_is_refused(made: Any) -> None:
    config, compiled, _ = made
    changed = Net()
    changed.steps = 1
    changed.linear = nn.Linear(8, 8, bias=False)
    with pytest.raises(StateError, match="other pieces"):
        traced_pieces(changed.forward, {"x": torch.randn(3, 8)}, config, compiled.plan)
