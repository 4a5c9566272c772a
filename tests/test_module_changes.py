"""Modules that change after their trace: the next call must equal the changed module run eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.counters import Count


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scale()).eval().requires_grad_(False)


def replace_weight(module: Any) -> None:
    module[0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def replace_data(module: Any) -> None:
    module[0].weight.data = torch.ones(4, 4)


def set_factor(module: Any) -> None:
    module[2].factor = 3.0


def swap(module: Any) -> None:
    module[2] = nn.Sigmoid()


def append(module: Any) -> None:
    module.append(nn.Sigmoid())


def train_child(module: Any) -> None:
    module[1].train()


def hook_child(module: Any) -> None:
    module[0].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("graphs", ["none", "full"])
@pytest.mark.parametrize("change", [replace_weight, replace_data, set_factor, swap, append, train_child, hook_child])
def test_change_after_the_trace(change: Callable[[Any], None], graphs: str) -> None:
    module = net()
    eager, x = copy.deepcopy(module), torch.randn(3, 4)
    rung.wrap(module, dynamic={}, graphs=graphs)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(x), eager(x))
        change(module)
        change(eager)
        for _ in range(2):
            torch.testing.assert_close(module(x), eager(x))
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in eager.state_dict().items() if "num" in key)


def test_what_forward_does_not_read_costs_no_trace() -> None:
    module, x = rung.wrap(Scale(), dynamic={}), torch.ones(3)
    for number in range(3):
        module.unread = number
        module(x)
    module.factor = 3.0
    module(x)
    module.factor = 2.0
    assert torch.equal(module(x), x * 2)
    assert module.rung.counters[Count.DYNAMO_TRACES] == 2


def test_gradient_wanted_after_the_trace() -> None:
    module = rung.wrap(nn.Linear(4, 4).requires_grad_(False), dynamic={})
    module(torch.randn(2, 4))
    module.requires_grad_(True)
    assert module(torch.randn(2, 4)).requires_grad
