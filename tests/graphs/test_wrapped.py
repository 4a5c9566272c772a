"""Graphs of a wrapped module: exact and padded sizes, outputs, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import ConfigError, LadderError, PaddingError, UnsupportedModuleError
from rung.graphs.wrapped import WrappedGraphs
from tests.compile.cases import uncompiled

ROWS = {0: "rows"}


def graphed(function: Callable[..., Any], *example: torch.Tensor, dims: Any = None, **options: Any) -> WrappedGraphs:
    """`function` behind graphs, its pieces uncompiled; every argument has dynamic rows unless `dims` says otherwise."""
    dynamic = dims or {"x": ROWS}
    compiled, _ = uncompiled(function, *example, dynamic=dynamic, pad=options.get("pad", ()))
    tensors = tuple(
        (path, dataclasses.replace(spec, shape=tuple(dynamic.get(path.dotted(), {}).get(dim, size) for dim, size in enumerate(spec.shape))))
        for path, spec in compiled.plan.tensors
    )
    compiled.plan = dataclasses.replace(compiled.plan, tensors=tensors)
    config = CompileConfig(dynamic=dynamic, **{"graphs": "auto", **options})
    return WrappedGraphs(compiled, config, Counters())


def steps(target: WrappedGraphs) -> dict[str, int]:
    return {name: count for name, count in target.counters.items() if name.startswith("step.")}


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def rows_and_size(x: torch.Tensor) -> dict[str, Any]:
    return {"y": x.cos(), "rows": x.shape[0], "x": x}


@pytest.mark.parametrize("graphs", ["piecewise", "full", "auto"])
def test_exact_sizes_are_captured_once_each(graphs: str) -> None:
    target = graphed(twice, torch.randn(3, 4), graphs=graphs)
    for rows in (3, 7, 3, 1, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(target(x), twice(x))
    assert target.counters[Count.REPLAYS] == 5
    assert target._manager is not None
    assert {descriptor.num_tokens for descriptor in target._manager.captured} <= {1, 3, 7}


def test_padded_sizes_share_the_graphs_of_the_ladder() -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), maximum=16)
    for rows in (3, 4, 5, 8, 2, 16):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(target(x), twice(x))
    assert target.counters[Count.CAPTURES] == len({4, 8, 2, 16})


def test_sizes_and_returned_arguments_are_those_of_the_call() -> None:
    target = graphed(rows_and_size, torch.randn(3, 4), pad=("rows",), maximum=16)
    x = torch.randn(5, 4)
    result = target(x)
    assert result["rows"] == 5
    assert result["x"] is x
    torch.testing.assert_close(result["y"], x.cos())


def test_cloned_outputs_survive_the_next_call() -> None:
    target = graphed(twice, torch.randn(3, 4))
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    kept = target(first)
    target(second)
    torch.testing.assert_close(kept, twice(first))


def test_borrowed_outputs_are_the_memory_of_the_graph() -> None:
    target = graphed(twice, torch.randn(3, 4), outputs="borrow")
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    kept = target(first)
    again = target(second)
    assert kept.data_ptr() == again.data_ptr()
    torch.testing.assert_close(kept, twice(second))


def test_sizes_above_the_ladder_run_without_a_graph_and_are_counted() -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), capture_sizes=(2, 4))
    for rows in (5, 50):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(target(x), twice(x))
    assert steps(target) == {"step.none.too_many_tokens": 2}


def test_exact_sizes_beside_the_given_ones_run_without_a_graph() -> None:
    target = graphed(twice, torch.randn(3, 4), capture_sizes=(2, 4))
    for rows in (2, 3):
        target(torch.randn(rows, 4))
    assert steps(target) == {"step.full.best": 1, "step.none.not_captured": 1}


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: x.softmax(0),
        lambda x: x.flip(0),
        lambda x: x / x.abs().amax(),
        lambda x: x.sort(dim=0).values,
    ],
)
def test_rows_that_mix_are_refused(mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return mix(x)

    target = graphed(forward, torch.randn(3, 4), pad=("rows",), maximum=16)
    with pytest.raises(PaddingError, match="output 0"):
        target(torch.randn(3, 4))


def test_a_number_computed_from_the_padded_size_is_refused() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1, x.shape[0] * 2

    target = graphed(forward, torch.randn(3, 4), pad=("rows",), maximum=16)
    with pytest.raises(PaddingError, match="a number computed from the padded size"):
        target(torch.randn(3, 4))


def test_a_module_that_writes_into_its_argument_is_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    target = graphed(forward, torch.randn(3, 4))
    x = torch.randn(3, 4)
    before = x.clone()
    with pytest.raises(UnsupportedModuleError, match="writes into its argument 'x'"):
        target(x)
    assert torch.equal(x, before)


def test_a_buffer_updated_in_place_counts_every_call() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    module = Counting().eval()
    target = graphed(module.forward, torch.randn(3, 4))
    x = torch.randn(3, 4)
    target(x)  # checks, warm-up and capture run it too
    start = float(module.calls)
    for call in range(1, 4):
        torch.testing.assert_close(target(x), x + start + call)


def test_two_dynamic_dimensions_are_refused_by_name() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(ConfigError, match=r"\['columns', 'rows'\]"):
        graphed(forward, torch.randn(3, 4), dims={"x": {0: "rows", 1: "columns"}})


def test_bad_capture_sizes_name_the_entry() -> None:
    with pytest.raises(LadderError, match="entry 1"):
        graphed(twice, torch.randn(3, 4), capture_sizes=(2, -1))


def test_capture_ahead_of_the_first_call() -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), maximum=16)
    target.capture([4, 8], [torch.randn(3, 4)])
    assert target.counters[Count.CAPTURES] == 2
    x = torch.randn(7, 4)
    torch.testing.assert_close(target(x), twice(x))
    assert target.counters[Count.CAPTURES] == 2


def test_release_captures_again() -> None:
    target = graphed(twice, torch.randn(3, 4))
    x = torch.randn(3, 4)
    target(x)
    target.release()
    torch.testing.assert_close(target(x), twice(x))
    assert target.counters[Count.CAPTURES] == 2
