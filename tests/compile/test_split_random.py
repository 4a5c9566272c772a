"""Random programs of views, in-place ops, tuple ops, sizes and split ops: stitched equals original."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import rung
from tests.compile.cases import uncompiled

ops = torch.ops.rungtest
Values = list[torch.Tensor]


def _unary(values: Values, pick: int, other: int) -> None:
    values.append(torch.sin(values[pick]))


def _binary(values: Values, pick: int, other: int) -> None:
    values.append(values[pick] + values[other] * 0.5)


def _row_view(values: Values, pick: int, other: int) -> None:
    values.append(values[pick].view(-1, 4))


def _transposed_twice(values: Values, pick: int, other: int) -> None:
    values.append(values[pick].transpose(0, 1).transpose(0, 1))


def _write_column(values: Values, pick: int, other: int) -> None:
    values[pick][:, 1:2].mul_(0.5)


def _write_half(values: Values, pick: int, other: int) -> None:
    values[pick][:, :2] = values[other][:, 2:]


def _add_in_place(values: Values, pick: int, other: int) -> None:
    values[pick].add_(1)


def _split_op(values: Values, pick: int, other: int) -> None:
    values.append(ops.double(values[pick]))


def _split_pair(values: Values, pick: int, other: int) -> None:
    values.extend(ops.pair(values[pick]))


def _split_write(values: Values, pick: int, other: int) -> None:
    out = torch.empty_like(values[pick])
    ops.write(values[pick], out)
    values.append(out)


def _split_write_over(values: Values, pick: int, other: int) -> None:
    ops.write(values[pick] * 1, values[other], 0.25)


def _tuple(values: Values, pick: int, other: int) -> None:
    values.extend(torch.cat(half, dim=1) for half in [values[pick].split(2, dim=1)])


def _size(values: Values, pick: int, other: int) -> None:
    values.append(values[pick] * (values[other].shape[0] + 1))


@rung.eager_break(out="x")
def on_the_host(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * factor)


@rung.eager_break(out="x")
def handed_back(x: torch.Tensor) -> torch.Tensor:
    return x


@rung.eager_break(mutates=("x",))
def written_between(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


def _eager_break(values: Values, pick: int, other: int) -> None:
    values.append(on_the_host(values[pick], 0.5 + other % 3))


def _eager_identity(values: Values, pick: int, other: int) -> None:
    values.append(handed_back(values[pick]))


def _eager_write(values: Values, pick: int, other: int) -> None:
    written_between(values[pick], values[other] * 0.5)


MOVES: list[Callable[[Values, int, int], None]] = [
    _unary,
    _binary,
    _row_view,
    _transposed_twice,
    _write_column,
    _write_half,
    _add_in_place,
    _split_op,
    _split_pair,
    _split_write,
    _split_write_over,
    _tuple,
    _size,
    _eager_break,
    _eager_identity,
    _eager_write,
]


def program(seed: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    draw = random.Random(seed)
    moves = [(draw.choice(MOVES), draw.randint(0, 99), draw.randint(0, 99)) for _ in range(draw.randint(3, 12))]

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x * 1]
        for move, first, second in moves:
            move(values, first % len(values), second % len(values))
        return tuple(values)

    return run


@pytest.mark.parametrize("seed", range(40))
def test_stitched_equals_original(seed: int) -> None:
    function = program(seed)
    compiled, _ = uncompiled(function, torch.zeros(3, 4))
    for rows in (1, 5):
        x = torch.randn(rows, 4)
        for actual, expected in zip(compiled(x), function(x), strict=True):
            torch.testing.assert_close(actual, expected)
