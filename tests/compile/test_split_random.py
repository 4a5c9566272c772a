"""Random modules of views, updates across cuts, tuples, methods, parameters and buffers, numbers of the host, blocks of autocast and split
ops: stitched equals original."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

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


def _write_both(values: Values, pick: int, other: int) -> None:
    ops.write_both(values[other][:, :2] * 1, values[pick][:, :2], values[pick][:, 2:])


def _autocast(values: Values, pick: int, other: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        product = values[pick] @ torch.eye(4)
        split = ops.double(product)
        values.append((split + product).float())


def _inference_block(values: Values, pick: int, other: int) -> None:
    with torch.no_grad():
        values.append(ops.double(values[pick]))


class Host:
    """Numbers and a list that live outside of the graph."""

    factor, shifts = 1.5, (0.25, 0.5)


def _host_number(values: Values, pick: int, other: int) -> None:
    values.append(values[pick] * Host.factor + Host.shifts[other % 2] * (pick + 1))


def _size_as_a_number(values: Values, pick: int, other: int) -> None:
    values.append(values[pick] * (values[other].size(0) * 0.5) + values[other].new_full((1,), 2.0))


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
    _write_both,
    _tuple,
    _size,
    _size_as_a_number,
    _host_number,
    _autocast,
    _inference_block,
    _eager_break,
    _eager_identity,
    _eager_write,
]
OF_THE_MODULE = ("parameter", "buffer", "update", "split update", "child")  # moves that take tensors of the module


class Program(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        choices = [*MOVES, *OF_THE_MODULE]
        self.moves = [(draw.choice(choices), draw.randint(0, 99), draw.randint(0, 99)) for _ in range(draw.randint(3, 14))]
        self.weight = nn.Parameter(torch.full((4,), 0.75), requires_grad=False)
        self.register_buffer("state", torch.zeros(4))
        self.child = nn.Linear(4, 4).requires_grad_(False)

    def of_the_module(self, kind: str, values: Values, pick: int) -> None:
        if kind == "parameter":
            values.append(values[pick] * self.weight)
        elif kind == "buffer":
            values.append(values[pick] + self.state)
        elif kind == "update":
            self.state.mul_(0.5).add_(values[pick].sum(0))
        elif kind == "split update":
            ops.write(values[pick].sum(0), self.state, 0.5)
        else:
            values.append(torch.tanh(self.child(values[pick])))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x * 1]
        for move, first, second in self.moves:
            if isinstance(move, str):
                self.of_the_module(move, values, first % len(values))
            else:
                move(values, first % len(values), second % len(values))
        return tuple(values)


@pytest.mark.parametrize("seed", range(60))
def test_stitched_equals_original(seed: int) -> None:
    module = Program(seed).eval()
    eager = copy.deepcopy(module)
    with torch.no_grad():
        compiled, _ = uncompiled(module.forward, torch.zeros(3, 4))
        for rows in (1, 5):
            x = torch.randn(rows, 4)
            for actual, expected in zip(compiled(x), eager(x), strict=True):
                torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(module.state, eager.state)


def test_every_move_is_drawn() -> None:
    drawn = {move for seed in range(60) for move, _, _ in Program(seed).moves}
    assert drawn == {*MOVES, *OF_THE_MODULE}
