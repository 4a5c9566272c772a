"""Buffers that a wrapped module updates in place: warm-up, capture and padding checks leave no trace in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rung
from rung.errors import PaddingError


class Counting(nn.Module):
    count: torch.Tensor

    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.by_rows = by_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x.sum() if self.by_rows else 1)
        return x * 2


@pytest.mark.parametrize("graphs", ["piecewise", "full"])
def test_each_call_counts_once(graphs: str) -> None:
    module = rung.wrap(Counting(by_rows=False), dynamic={"x": {0: "rows"}}, graphs=graphs, pad=("rows",), maximum=8)
    module.rung.capture([2], torch.ones(2, 4))
    for calls, rows in enumerate((3, 1, 7, 3), start=1):
        module(torch.ones(rows, 4))
        assert module.count == calls


def test_padded_rows_in_a_buffer_are_refused() -> None:
    module = rung.wrap(Counting(by_rows=True), dynamic={"x": {0: "rows"}}, graphs="full", pad=("rows",), maximum=8)
    with pytest.raises(PaddingError, match="count"):
        module(torch.ones(3, 4))
    assert module.count == 0


def test_suspending_resuming_and_capturing_again_do_not_count() -> None:
    module = rung.wrap(Counting(by_rows=False), dynamic={"x": {0: "rows"}}, graphs="full", pad=("rows",), maximum=8)
    module(torch.ones(3, 4))
    module.rung.suspend()
    module(torch.ones(3, 4))
    assert module.rung.last_step()["reason"] == "suspended"
    module.rung.resume()
    module.rung.recapture()
    module(torch.ones(3, 4))
    assert module.count == 3
    assert module.rung.last_step()["reason"] == "best"
    assert "1 steps none: the graphs were suspended and not resumed (to do: call resume())" in module.rung.explain()


def test_weights_that_lie_elsewhere_are_read_after_recapture() -> None:
    module = rung.wrap(nn.Linear(4, 4), dynamic={"input": {0: "rows"}}, graphs="full", pad=("rows",), maximum=8)
    with torch.no_grad():
        module(torch.ones(3, 4))
        module.weight.data = torch.eye(4) * 2
        module.bias.zero_()
        module.rung.recapture()
        with module.rung.counters.expect(captures=0, **{"step.full.best": 1}):
            assert torch.equal(module(torch.ones(3, 4)), torch.full((3, 4), 2.0))
