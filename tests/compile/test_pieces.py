"""When two pieces are one: the key, and what must keep them apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compile.cases import Block, Stack, double, run_python, split


def unique(blocks: list[nn.Module]) -> int:
    return len(split(Stack(blocks).forward, torch.zeros(3, 8))[1].pieces)


def keys(function: Callable[..., Any], *args: Any) -> list[str]:
    return [piece.key for piece in split(function, *args)[1].pieces]


def with_layout(block: Block) -> Block:
    block.linear.weight = nn.Parameter(block.linear.weight.detach().t().contiguous().t())
    return block


def test_weights_do_not_count() -> None:
    assert unique([Block(), Block(), Block(), Block()]) == 3  # first, middle, last


def test_epsilon_counts() -> None:
    assert unique([Block(), Block(), Block(epsilon=0.5), Block()]) == 4


def test_stride_of_a_weight_counts() -> None:
    assert unique([Block(), Block(), with_layout(Block()), Block()]) > 3


def test_dtype_of_the_argument_counts() -> None:
    assert keys(double_plus, torch.zeros(3, 4)) != keys(double_plus, torch.zeros(3, 4, dtype=torch.float64))


def double_plus(x: torch.Tensor) -> torch.Tensor:
    return double(x) + 1


def test_names_of_values_do_not_count() -> None:
    def other_names(x: torch.Tensor) -> torch.Tensor:
        something = double(x)
        return something + 1

    assert keys(other_names, torch.zeros(3, 4)) == keys(double_plus, torch.zeros(3, 4))


def test_traced_again_is_the_same() -> None:
    assert keys(Block().forward, torch.zeros(3, 8)) == keys(Block().forward, torch.zeros(5, 8))


@pytest.mark.slow
def test_key_does_not_depend_on_the_process(tmp_path: Path) -> None:
    code = (
        "import torch; from tests.compile.cases import Block, split\n"
        "print([p.key for p in split(Block().forward, torch.zeros(3, 8))[1].pieces])"
    )
    seeds = [run_python(code, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=tmp_path) for seed in ("1", "2")]
    assert seeds[0] == seeds[1] == str(keys(Block().forward, torch.zeros(3, 8)))
