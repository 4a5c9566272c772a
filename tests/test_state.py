"""Modules that keep state between calls: made at the first call, updated in place, copied, replayed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.counters import Count
from rung.errors import UnsupportedModuleError
from tests.compile.cases import STRUCTURES, Structures, assert_same

ROWS = {"x": {0: "rows"}}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


class Lazy(nn.Module):
    """Makes a table at its first call and counts in a buffer."""

    def __init__(self, registered: bool = True) -> None:
        super().__init__()
        self.child = nn.Module()
        if registered:
            self.child.register_buffer("table", None)
        else:
            self.child.table = None
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.child.table is None:
            self.child.table = torch.arange(4.0)
        self.count.add_(1)
        return x * self.child.table + self.count


@pytest.mark.parametrize("registered", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("serve", MODES)
@pytest.mark.parametrize("warm", MODES)
def test_state_of_the_first_call_in_every_mode(warm: str, serve: str, registered: bool) -> None:
    module, eager = Lazy(registered), Lazy(registered)
    rung.wrap(module, dynamic=ROWS)
    for mode in (warm, serve):
        with MODES[mode]():
            for rows in (3, 2):
                x = torch.ones(rows, 4)
                assert_same(module(x) + 0, eager(x) + 0)
    assert not module.child.table.is_inference()
    assert not module.count.is_inference()
    module.child.table.add_(1)  # in place, outside of inference mode
    assert_same(module(torch.ones(3, 4)), torch.ones(3, 4) * (torch.arange(4.0) + 1) + 5)
    assert module.rung.counters["eager.lazy_state"] == 1
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1


class KeepsLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return self.last + 1


def test_what_changes_at_every_call_is_refused_at_the_second() -> None:
    module = rung.wrap(KeepsLast(), dynamic=ROWS)
    x = torch.ones(3, 4)
    assert_same(module(x), x * 2 + 1)
    with pytest.raises(UnsupportedModuleError, match="assigns the attribute 'last'"):
        module(x)


@pytest.mark.parametrize("graphs", ["none", "piecewise", "full"])
def test_batch_norm_in_training_counts_each_call_once(graphs: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train().requires_grad_(False)
    module = rung.wrap(copy.deepcopy(eager), dynamic={}, graphs=graphs)
    for _ in range(3):
        x = torch.randn(6, 4)
        assert_same(module(x), eager(x))
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value)
    assert module[1].num_batches_tracked == 3


@pytest.mark.parametrize("graphs", ["piecewise", "full"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_captured_module_shares_no_graph(copied: Any, graphs: str) -> None:
    module = rung.wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), dynamic={"input": {0: "rows"}}, graphs=graphs)
    x = torch.randn(3, 4)
    before = module(x)
    other = copied(module)
    other[0].weight.zero_()
    other[0].bias.fill_(2.0)
    assert_same(other(x), torch.full((3, 4), 2.0))
    assert_same(module(x), before)
    assert other.rung.counters[Count.CAPTURES] == module.rung.counters[Count.CAPTURES] == 1
    other.rung.release()
    assert_same(module(x), before)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_output_structure_of_a_replay(kind: str) -> None:
    module = rung.wrap(Structures(kind), dynamic=ROWS, graphs="full")
    eager = Structures(kind)
    for rows in (3, 3, 2, 3):
        x = torch.randn(rows, 4)
        assert_same(module(x), eager(x))
    assert module.rung.counters[Count.CAPTURES] == 2


class Generates(nn.Module):
    """`forward` is called by other methods, which stay plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.cat([x, self(x)[-1:]])
        return x


def test_methods_around_forward_use_the_compiled_one() -> None:
    eager = Generates().requires_grad_(False)
    module = rung.wrap(copy.deepcopy(eager), dynamic=ROWS)
    x = torch.randn(2, 4)
    assert_same(module.generate(x, 4), eager.generate(x, 4))
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1
    assert module.rung.counters[Count.EAGER_CALLS] == 0
