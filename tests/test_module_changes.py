"""Modules that change after their trace: the next call must equal the changed module run eagerly."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.counters import Count
from rung.errors import GuardError, InputMismatchError


class Tables(nn.Module):
    """Tensors that are no buffers: of the module, and of an object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(4)
        self.held = types.SimpleNamespace(factor=torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.held.factor + self.shift


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


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_tensors_that_are_no_buffers_are_followed(graphs: str) -> None:
    module, eager, x = rung.wrap(Tables(), dynamic={}, graphs=graphs), Tables(), torch.randn(3, 4)
    for number in range(2):
        for net in (module, eager):
            net.shift, net.held.factor = torch.full((4,), 2.0 + number), torch.full((4,), 3.0 + number)
        for _ in range(2):
            torch.testing.assert_close(module(x), eager(x))
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1


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


def test_a_violated_guard_is_counted_and_named() -> None:
    module, x = rung.wrap(Scale(), dynamic={}), torch.ones(3)
    module(x)
    assert module.rung.counters[Count.GUARD_RETRACES] == 0
    module.factor = 3.0
    assert torch.equal(module(x), x * 3)
    assert module.rung.counters[Count.GUARD_RETRACES] == 1
    assert module.rung.report()[1]["retraced"] == "'self.factor' was 2.0 and is 3.0"
    assert module.rung.report()[1]["guards"]["checked"]["value"] >= 1


def test_policies_of_violated_guards() -> None:
    strict = rung.wrap(Scale(), dynamic={}, on_guard_violation="raise")
    bounded = rung.wrap(Scale(), dynamic={}, max_variants=1)
    careless = rung.wrap(Scale(), dynamic={}, drop_guards=("value",))
    x = torch.ones(3)
    for module in (strict, bounded, careless):
        module(x)
        module.factor = 3.0
    with pytest.raises(GuardError, match=r"was traced when 'self.factor' was 2.0 and is 3.0"):
        strict(x)
    with pytest.raises(InputMismatchError, match=r"'self.factor' was 2.0 and is 3.0"):
        bounded(x)
    assert torch.equal(careless(x), x * 2)  # what was asked for
    assert careless.rung.report()[0]["guards"]["dropped"] == ["value"]


FACTOR = 2.0


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def test_a_plan_in_the_store_is_held_against_its_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    shared = {"factor": 2.0}

    def by_cell(x: torch.Tensor) -> torch.Tensor:
        return x * shared["factor"]

    for value in (2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", value)
        shared["factor"] = value
        for function in (by_global, by_cell):
            assert torch.equal(rung.wrap(function, dynamic={})(x), x * value)


def test_alternating_signatures_stay_on_the_fast_road() -> None:
    module = rung.wrap(Scale(), dynamic={})
    short, long = torch.ones(3), torch.ones(3, 2)
    for x in (short, long):
        module(x)
    module.rung._entry._chain[-1].miss = None  # the slow road behind the last variant would raise
    for x in (short, long, short, long):
        assert torch.equal(module(x), x * 2)
    assert module.rung.counters[Count.DYNAMO_TRACES] == 2


def test_a_function_mode_around_the_call_is_not_that_of_the_trace() -> None:
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(3)

    function = rung.wrap(fresh, dynamic={})
    function(torch.ones(3))
    with torch.device("meta"), pytest.raises(Exception, match=r"meta|device|fake tensor"):
        function(torch.ones(3, device="cpu"))
    assert torch.equal(function(torch.ones(3)), torch.ones(3) * 2)
