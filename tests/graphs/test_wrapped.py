"""Graphs of a wrapped module: exact and padded sizes, outputs, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import ConfigError, LadderError, PaddingError, UnsupportedModuleError
from rung.graphs.module_grid import _given_sizes
from rung.graphs.wrapped import WrappedGraphs
from tests.compile.cases import HOST_FACTOR, double, uncompiled

ROWS = {0: "rows"}


def graphed(function: Callable[..., Any], *example: torch.Tensor, dims: Any = None, bounds: Any = None, **options: Any) -> WrappedGraphs:
    """`function` behind graphs, its pieces uncompiled; every argument has dynamic rows unless `dims` says otherwise. `bounds` are the
    largest sizes of dimensions."""
    dynamic = dims or {"x": ROWS}
    compiled, _ = uncompiled(function, *example, dynamic=dynamic, pad=options.get("pad", ()))
    tensors = tuple(
        (path, dataclasses.replace(spec, shape=tuple(dynamic.get(path.dotted(), {}).get(dim, size) for dim, size in enumerate(spec.shape))))
        for path, spec in compiled.plan.tensors
    )
    compiled.plan = dataclasses.replace(compiled.plan, tensors=tensors, bounds=compiled.plan.bounds if bounds is None else bounds)
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
    with pytest.raises(PaddingError, match=r"rows of 'rows' mix in \w+ .* at .*test_wrapped.py:\d+"):
        target(torch.randn(3, 4))
    assert target.counters[Count.PADDING_CHECKS] == 0  # refused without running


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


# --- proof and run -------------------------------------------------------------------------------------------------------------------


def custom(x: torch.Tensor) -> torch.Tensor:
    return double(x) + 1


def test_a_proved_module_is_run_once_under_two_paddings() -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), maximum=16)
    for rows in (3, 5, 6):
        target(torch.randn(rows, 4))
    assert target.compiled.plan.rows == {"rows": None}
    assert target.counters[Count.PADDING_CHECKS] == 1


def test_an_unproved_module_is_refused() -> None:
    target = graphed(custom, torch.randn(3, 4), pad=("rows",), maximum=16)
    with pytest.raises(PaddingError, match="rows of 'rows' are not proved to be independent: double") as error:
        target(torch.randn(3, 4))
    assert "pad_unproved=True" in error.value.hint


def test_an_unproved_module_is_padded_and_counted_when_allowed() -> None:
    target = graphed(custom, torch.randn(3, 4), pad=("rows",), maximum=16, pad_unproved=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(target(x), custom(x))
    assert target.counters[Count.UNPROVED_PADDING] == 1


def test_an_allowed_module_whose_run_differs_is_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return double(x).sum(0) + x

    target = graphed(forward, torch.randn(3, 4), pad=("rows",), maximum=16, pad_unproved=True)
    with pytest.raises(PaddingError, match="rows mix under padding: output 0 differs"):
        target(torch.randn(3, 4))


def test_a_proof_that_a_run_contradicts_is_refused_and_both_are_stated() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    target = graphed(forward, torch.randn(3, 4), pad=("rows",), maximum=16)
    target.compiled.plan = dataclasses.replace(target.compiled.plan, rows={"rows": None})
    with pytest.raises(PaddingError, match="the analysis proves the rows of 'rows' independent, but a padded run differs: rows mix"):
        target(torch.randn(3, 4))


# --- several dimensions --------------------------------------------------------------------------------------------------------------

BATCH_FRAMES = {"x": {0: "batch", 1: "frames"}}


def framewise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.softmax(-1).transpose(0, 1), x[..., 0] * 2


@pytest.mark.parametrize("pad", [(), ("batch",), ("frames",), ("batch", "frames")])
def test_two_dimensions_are_captured_by_combination_and_cut_in_each(pad: tuple[str, ...]) -> None:
    sizes = dict.fromkeys(pad, (4, 8))
    target = graphed(framewise, torch.randn(3, 5, 4), dims=BATCH_FRAMES, pad=pad, capture_sizes=sizes)
    for shape in ((3, 3), (3, 2), (4, 7), (8, 8), (1, 5)):
        x = torch.randn(*shape, 4)
        torch.testing.assert_close(target(x), framewise(x))
    assert steps(target) == {"step.full.best": 5}


def test_padded_combinations_share_graphs() -> None:
    sizes = {"batch": (4, 8), "frames": (4, 8)}
    target = graphed(framewise, torch.randn(3, 5, 4), dims=BATCH_FRAMES, pad=("batch", "frames"), capture_sizes=sizes)
    for shape in ((8, 8), (3, 3), (2, 4), (4, 1), (7, 3)):
        target(torch.randn(*shape, 4))
    assert target.counters[Count.CAPTURES] == len({(8, 8), (4, 4), (8, 4)})


def test_the_dimension_that_is_too_large_is_counted() -> None:
    sizes = {"batch": (4,), "frames": (4,)}
    target = graphed(framewise, torch.randn(3, 5, 4), dims=BATCH_FRAMES, pad=("batch", "frames"), capture_sizes=sizes)
    for shape in ((5, 3), (3, 5)):
        target(torch.randn(*shape, 4))
    assert steps(target) == {"step.none.too_many_tokens": 1, "step.none.other_dimension": 1}


def test_combinations_are_captured_ahead_by_name() -> None:
    target = graphed(framewise, torch.randn(3, 5, 4), dims=BATCH_FRAMES, pad=("batch", "frames"), maximum=8)
    target.capture([{"batch": 4, "frames": 8}], [torch.randn(3, 5, 4)])
    x = torch.randn(3, 7, 4)
    torch.testing.assert_close(target(x), framewise(x))
    assert target.counters[Count.CAPTURES] == 1


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([], r"are \[\], expected a list of at least one"),
        (4, "are 4, expected a list"),
        ("4", "are '4', expected a list"),
        ([4, 0], "entry 1 of the sizes to capture is 0"),
        ([4, 1.5], "entry 1 of the sizes to capture is 1.5"),
        ([True], "entry 0 of the sizes to capture is True"),
        ([4, 64], "entry 1 of the sizes to capture is 64, above the maximum 32 of 'rows'"),
    ],
)
@pytest.mark.parametrize("pad", [(), ("rows",)])
def test_sizes_that_no_call_can_have_are_not_captured(sizes: Any, text: str, pad: tuple[str, ...]) -> None:
    target = graphed(twice, torch.randn(3, 4), pad=pad)
    target.compiled.plan = dataclasses.replace(target.compiled.plan, bounds={"rows": 32})
    with pytest.raises(LadderError, match=text):
        target.capture(sizes, [torch.randn(3, 4)])
    assert target.counters[Count.CAPTURES] == 0


def test_a_size_to_capture_names_every_dimension() -> None:
    target = graphed(framewise, torch.randn(3, 5, 4), dims=BATCH_FRAMES)
    with pytest.raises(ConfigError, match=r"entry 0 of the sizes to capture names \['batch'\]"):
        target.capture([4], [torch.randn(3, 5, 4)])


def test_one_list_of_sizes_for_two_dimensions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capture_sizes is one list.*\nhint: give a list for each: capture_sizes=\{'batch'"):
        graphed(framewise, torch.randn(3, 5, 4), dims=BATCH_FRAMES, capture_sizes=(4, 8))
    with pytest.raises(ConfigError, match=r"hint: name them in `dynamic`, and give a list for each"):
        _given_sizes(CompileConfig(capture_sizes=(4, 8)), ("~x", "~y"), "~x")


def test_a_mixing_dimension_is_refused_though_the_other_is_not() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)

    target = graphed(forward, torch.randn(3, 5, 4), dims=BATCH_FRAMES, pad=("batch",), maximum=8)
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(target(x), forward(x))
    target = graphed(forward, torch.randn(3, 5, 4), dims=BATCH_FRAMES, pad=("batch", "frames"), maximum=8)
    with pytest.raises(PaddingError, match="rows of 'frames' mix in mean"):
        target(x)


# --- modules -------------------------------------------------------------------------------------------------------------------------


class VisionBlock(nn.Module):
    """Patch embedding, a class token, attention over the patches of each image, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)  # [rows, 4, 8]
        hidden = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.position
        q, k, v = self.qkv(self.norm(hidden)).reshape(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        hidden = hidden + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (hidden + self.mlp(hidden))[:, 0]


class Recommender(nn.Module):
    """Three bags of categories beside dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(20, 4, mode=mode) for mode in ("sum", "mean", "max")])
        self.mlp = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bags = [bag(ids[:, index]) for index, bag in enumerate(self.bags)]
        return self.mlp(torch.cat([x, *bags], 1)).squeeze(-1)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


@torch.no_grad()
def run_padded(module: nn.Module, dims: Any, make: Callable[[int], tuple[torch.Tensor, ...]]) -> WrappedGraphs:
    target = graphed(module.forward, *make(3), dims=dims, pad=("rows",), maximum=8)
    for rows in (3, 5, 8, 1):
        inputs = make(rows)
        torch.testing.assert_close(target(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)
    return target


def test_a_vision_block_runs_in_graphs() -> None:
    target = run_padded(VisionBlock().eval(), {"x": ROWS}, lambda rows: (torch.randn(rows, 3, 8, 8),))
    assert steps(target) == {"step.full.best": 4}


def test_a_recommender_runs_in_graphs() -> None:
    def make(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 3), torch.randint(0, 20, (rows, 3, 5))

    target = run_padded(Recommender().eval(), {"x": ROWS, "ids": ROWS}, make)
    assert steps(target) == {"step.full.best": 4}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 cannot be told that sizes begin at 1, which a batch norm asks")
def test_a_batch_norm_runs_in_graphs_in_evaluation_and_is_refused_in_training() -> None:
    target = run_padded(BatchNorm().eval(), {"x": ROWS}, lambda rows: (torch.randn(rows, 3, 2, 2),))
    assert steps(target) == {"step.full.best": 4}
    x = torch.randn(3, 3, 2, 2)
    target = graphed(BatchNorm().train().forward, x, pad=("rows",), maximum=8)
    with pytest.raises(PaddingError, match=r"mix in batch_norm .*statistics over all rows of the batch \(training mode\)"):
        target(x)


def test_bad_capture_sizes_name_the_entry() -> None:
    with pytest.raises(LadderError, match="entry 1"):
        graphed(twice, torch.randn(3, 4), capture_sizes=(2, -1))


@pytest.mark.parametrize("pad", [(), ("rows",)])
def test_no_size_above_the_maximum_is_captured(pad: tuple[str, ...]) -> None:
    with pytest.raises(LadderError, match="entry 1 of the ladder is 200, above the maximum 100"):
        graphed(twice, torch.randn(3, 4), pad=pad, capture_sizes=(4, 200), bounds={"rows": 100})


@pytest.mark.parametrize(("pad", "maximum", "sizes"), [(("rows",), 100, (8, 16, 100)), (("rows",), 513, (8, 16)), ((), 100, (8, 16))])
def test_a_list_of_a_padded_dimension_ends_at_the_maximum(pad: tuple[str, ...], maximum: int, sizes: tuple[int, ...]) -> None:
    target = graphed(twice, torch.randn(3, 4), pad=pad, capture_sizes=(8, 16), bounds={"rows": maximum})
    assert target.grid.axes[0].ladder is not None
    assert target.grid.axes[0].ladder.sizes == sizes


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


@pytest.mark.parametrize(("max_waste", "counted"), [(2.0, "step.none.padding"), (4.0, "step.full.best"), (None, "step.full.best")])
def test_a_call_is_not_padded_beyond_the_waste_cap(max_waste: float | None, counted: str) -> None:
    target = graphed(twice, torch.randn(3, 4), pad=("rows",), capture_sizes=(8, 64), max_waste=max_waste)
    x = torch.randn(20, 4)
    torch.testing.assert_close(target(x), twice(x))
    assert steps(target) == {counted: 1}


def test_a_break_that_decides_on_the_host_cuts_a_full_graph_and_stays_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = torch.ops.rungtest.host_scale(double(x + 1))
        return double(scaled - 1) + 2

    target = graphed(forward, torch.randn(3, 4), graphs="full")
    for factor in (2.0, 5.0):
        monkeypatch.setitem(HOST_FACTOR, "factor", factor)
        x = torch.randn(3, 4)
        torch.testing.assert_close(target(x), (double(x + 1) * factor - 1) * 2 + 2)
    assert steps(target) == {"step.full.host_break": 2}
    assert target._manager is not None
    (descriptor,) = target._manager.captured
    assert target._manager.program(descriptor).num_graphs == 2


def test_over_the_memory_budget_a_size_runs_without_a_graph() -> None:
    target = graphed(twice, torch.randn(3, 4), graph_memory_bytes=0)
    for rows in (3, 7, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(target(x), twice(x))
    assert steps(target) == {"step.none.memory_budget": 3}
    memory = target.memory()
    assert memory is not None
    assert (memory.total_bytes, [one.num_tokens for one in memory.trimmed]) == (0, [7, 3])


def test_within_the_memory_budget_sizes_are_captured_until_it_is_full() -> None:
    free = graphed(twice, torch.randn(3, 4))
    free(torch.randn(3, 4))
    memory = free.memory()
    assert memory is not None
    target = graphed(twice, torch.randn(3, 4), graph_memory_bytes=memory.total_bytes)
    for rows in (3, 2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(target(x), twice(x))
    assert steps(target) == {"step.full.best": 2, "step.none.memory_budget": 1}


def test_a_negative_memory_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="graph_memory_bytes must be at least 0"):
        CompileConfig(graphs="full", graph_memory_bytes=-1)
