"""Where a graph is cut, seen in the steps of the plan; values are compared with the original function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rung.compile.split import mutates
from rung.errors import UnsupportedModuleError
from tests.compile.cases import Block, Stack, assert_same, double, split, uncompiled

Function = Callable[..., Any]
ops = torch.ops.rungtest


def steps_of(function: Function, *args: torch.Tensor) -> list[str]:
    compiled, _ = uncompiled(function, *args)
    return [step.name for step in compiled.steps]


def only_split_op(x: torch.Tensor) -> torch.Tensor:
    return double(x)


def first(x: torch.Tensor) -> torch.Tensor:
    return double(x) + 1


def last(x: torch.Tensor) -> torch.Tensor:
    return double(x + 1)


def adjacent(x: torch.Tensor) -> torch.Tensor:
    return double(double(x + 1)) - 1


def apart(x: torch.Tensor) -> torch.Tensor:
    return double(torch.sin(double(x + 1))) - 1


def empty_between(x: torch.Tensor) -> torch.Tensor:
    y = double(x + 1)
    out = torch.empty_like(x)
    ops.write(y, out)
    return out + y


def view_between(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = double(y)
    ops.write(z, y.view(-1, 4))
    return y + z


def view_of_the_break_result(x: torch.Tensor) -> torch.Tensor:
    return double(double(x + 1).transpose(0, 1)) - 1


def flatten_after_write(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.write(x + 1, out)
    return double(out.flatten(1)) * 3


def write_then_read(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    before = y + 1
    ops.write(x, y, 5.0)
    return before + y


def tuple_op(x: torch.Tensor) -> torch.Tensor:
    a, b = ops.pair(x + 1)
    return a * b


def tuple_op_half_used(x: torch.Tensor) -> torch.Tensor:
    _, b = ops.pair(x + 1)
    return b * 2


def tuple_op_read_late(x: torch.Tensor) -> torch.Tensor:
    a, b = ops.pair(x + 1)
    y = double(a) + 1
    return y * b


def unused_result(x: torch.Tensor) -> torch.Tensor:
    double(x + 1)
    return x - 1


def in_place_result_unused(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 1:2].mul_(0.5)
    z = double(y)
    y += 1
    y[:, 0] = 7
    torch.relu_(y)
    return z + y


def size_argument(x: torch.Tensor) -> torch.Tensor:
    return ops.first_rows(x + 1, x.shape[0] // 2) * 2


def size_used_late(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    y = double(x + 1)
    return torch.zeros(y.shape[0] * 2, 2) + y.sum(), y.shape[0] + 1


def sizes_of_a_wider_tensor(x: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x, x])
    z = double(y)
    return torch.ones(z.shape[0] + 1, 2) * z.sum()


def keyword_argument(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.write(x=x, out=out, scale=3.0)
    return out + 1


def slice_of_a_piece(x: torch.Tensor) -> torch.Tensor:
    q, k = (x + 1).split(2, dim=1)
    return double(q) + k


def result_is_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return double(x + 1), x


STEPS: dict[Function, list[str]] = {
    only_split_op: ["double_00"],
    first: ["double_00", "piece_00"],
    last: ["piece_00", "double_00"],
    adjacent: ["piece_00", "double_00", "piece_01"],
    apart: ["piece_00", "double_00", "piece_01", "double_01", "piece_02"],
    empty_between: ["piece_00", "write_00", "piece_01"],
    view_between: ["piece_00", "write_00", "piece_01"],
    view_of_the_break_result: ["piece_00", "double_00", "piece_01", "double_01", "piece_02"],
    flatten_after_write: ["piece_00", "write_00", "piece_01", "double_01", "piece_02"],
    tuple_op: ["piece_00", "pair_00", "piece_01"],
    unused_result: ["piece_00"],
    size_argument: ["piece_00", "first_rows_00.0", "first_rows_00.1", "piece_01"],  # the arithmetic on sizes is a part of its own
}
ALL = [*STEPS, write_then_read, tuple_op_half_used, tuple_op_read_late, size_used_late, sizes_of_a_wider_tensor, keyword_argument]
ALL += [in_place_result_unused, slice_of_a_piece, result_is_input]


@pytest.mark.parametrize("function", STEPS, ids=lambda function: function.__name__)
def test_steps(function: Function) -> None:
    assert steps_of(function, torch.zeros(3, 4)) == STEPS[function]


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("function", ALL, ids=lambda function: function.__name__)
def test_stitched_equals_original(function: Function, rows: int) -> None:
    compiled, _ = uncompiled(function, torch.zeros(3, 4))
    x = torch.randn(rows, 4)
    assert_same(compiled(x), function(x.clone()))


def test_view_of_a_written_storage_stays_behind_the_break() -> None:
    compiled, _ = uncompiled(flatten_after_write, torch.zeros(3, 4))
    write = next(index for index, step in enumerate(compiled.steps) if step.name == "write_00")
    flattened = compiled.plan.steps[write + 1]
    assert flattened.piece is not None
    assert not set(flattened.outputs) & {number for step in compiled.plan.steps[: write + 1] for number in step.outputs}


def test_operators_whose_names_begin_alike_write_nothing() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    nodes = [
        graph.call_function(operator.invert, (x,)),
        graph.call_function(operator.iadd, (x, x)),
        graph.call_function(operator.index, (x,)),
    ]
    assert [mutates(node) for node in nodes] == [False, True, False]


def test_order_of_split_ops_is_kept() -> None:
    compiled, _ = uncompiled(empty_between, torch.zeros(3, 4))
    calls = [call.target for step in compiled.plan.steps for call in step.calls]
    assert calls == ["rungtest::double", "rungtest::write"]


def test_equal_blocks_share_one_piece() -> None:
    _, graph = split(Stack([Block() for _ in range(8)]).forward, torch.zeros(3, 8))
    assert len([step for step in graph.steps if step.piece is not None]) == 9
    assert len(graph.pieces) == 3  # first, middle, last


def constant_in_forward(x: torch.Tensor) -> torch.Tensor:
    return double(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_constant_tensor_equals_original_or_is_refused() -> None:
    try:
        compiled, _ = uncompiled(constant_in_forward, torch.zeros(3, 4))
    except UnsupportedModuleError as error:
        assert "test_split.py" in error.message  # noqa: PT017 - an error is as good as the right value
    else:
        x = torch.randn(3, 4)
        assert_same(compiled(x), constant_in_forward(x))
