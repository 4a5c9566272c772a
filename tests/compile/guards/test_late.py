"""What is looked at behind the work: all of it in one call where it is little, in turns where it is much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rung.compile.guards import GuardState, Roots
from rung.compile.trace import trace


def net(layers: int) -> Any:
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)]).eval().requires_grad_(False)


def state_of(module: Any) -> GuardState:
    with torch.no_grad():
        guards = trace(module.forward, {"input": torch.ones(3, 2)}, {}).guards
    return GuardState(guards, Roots(module.forward))


class Other(nn.Linear):
    pass


def put_in_by_hand(net: Any) -> None:
    net[1]._forward_hooks[0] = lambda *_: None


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda net: setattr(net[1], "weight", nn.Parameter(torch.ones(2, 2))),
    "storage": lambda net: setattr(net[1].weight, "data", torch.ones(2, 2)),
    "strides at one address": lambda net: net[1].weight.t_(),
    "size at one address": lambda net: setattr(net[1].weight, "data", net[1].weight.data[:1]),
    "parameter that is gone": lambda net: setattr(net[1], "bias", None),
    "submodule": lambda net: net.__setitem__(1, nn.Linear(2, 2)),
    "class of a submodule": lambda net: setattr(net[1], "__class__", Other),
    "method of a submodule": lambda net: setattr(net[1], "forward", lambda x: x),
    "hook": lambda net: net[1].register_forward_hook(lambda *_: None),
    "hook without a handle": put_in_by_hand,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_small_module_is_looked_at_as_a_whole(name: str) -> None:
    module = net(2)
    state = state_of(module)
    for _ in range(3):
        assert state.unchanged()
        assert state.swept()
    CHANGES[name](module)
    assert not (state.unchanged() and state.swept())


@pytest.mark.parametrize("name", CHANGES)
def test_a_large_one_in_turns(name: str) -> None:
    module = net(60)
    state = state_of(module)
    assert all(state.unchanged() and state.swept() for _ in range(100))
    CHANGES[name](module)
    turns = next(turn for turn in range(200) if not (state.unchanged() and state.swept()))
    assert turns < (5 if name in ("parameter", "storage", "submodule", "parameter that is gone", "method of a submodule") else 40)
    assert not (state.unchanged() and state.all_swept())


def test_hooks_elsewhere_cost_one_look() -> None:
    module, stranger = net(2), nn.Linear(2, 2)
    state = state_of(module)
    stranger.register_forward_hook(lambda *_: None)
    assert state.unchanged()
    handle = module[0].register_forward_pre_hook(lambda *_: None)
    assert not state.unchanged()
    handle.remove()
    assert state.unchanged()


def test_before_a_call_that_writes_all_identities_are_looked_at() -> None:
    module = net(60)
    state = state_of(module)
    assert state.identities_swept()
    for name in ("parameter", "storage", "submodule", "method of a submodule"):
        module = net(60)
        state = state_of(module)
        CHANGES[name](module)
        assert not state.identities_swept()
