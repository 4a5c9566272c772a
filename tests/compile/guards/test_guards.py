"""What a trace has read and what becomes of it: each case changes one thing between two looks at the guards. Nothing is compiled here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from rung.compile.guards import Guard, GuardSet, GuardState, Kind, Roots
from rung.compile.guards.roots import path_of
from rung.compile.trace import trace
from rung.errors import GuardError

SCALE = 2.0
TABLE: dict[str, Any] = {"scale": 2.0, "shifts": [1.0, 2.0]}


@dataclass
class Settings:
    eps: float = 1.0
    names: list[str] = field(default_factory=lambda: ["a", "b"])


SETTINGS = Settings()


def helper(x: torch.Tensor, shift: float = 1.0) -> torch.Tensor:
    return x + shift


def other_helper(x: torch.Tensor, shift: float = 1.0) -> torch.Tensor:
    return x - shift


def closure(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return scaled


scaled = closure(3.0)


class Layer(nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.norm, self.up, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(4))
        self.activation = torch.relu
        self.optional: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.optional is not None:
            return x
        return self.activation(self.up(self.drop(self.norm(x)))) * self.config.eps + self.shift


class Net(nn.Module):
    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(SETTINGS) for _ in range(2))
        self.factors = [1.0, 2.0]
        self.options = {"twice": True, "parts": {"a": 1}}
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for factor in self.factors:
            x = x * factor
        for name in self.options["parts"]:
            x = x + len(name)
        x = x * len(SETTINGS.names) + self.limit
        x = scaled(helper(x)) * SCALE * TABLE["scale"] + TABLE["shifts"][1]
        return x * 2 if self.options["twice"] else x


def set_global(_: Any) -> None:
    global SCALE
    SCALE = 3.0


def set_class_attribute(_: Any) -> None:
    Net.limit = 4


def set_defaults(_: Any) -> None:
    helper.__defaults__ = (2.0,)


def set_cell(_: Any) -> None:
    scaled.__closure__[0].cell_contents = 4.0  # type: ignore[attr-defined]


def replace_function(_: Any) -> None:
    global helper
    helper = other_helper


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda net: setattr(net.layers[1], "optional", 1), "'self.layers.1.optional' was None and is 1"),
    "attribute of a torch module": (lambda net: setattr(net.layers[0].norm, "eps", 1e-3), "norm.eps' was 1e-05 and is 0.001"),
    "training": (lambda net: net.layers[0].drop.train(), "'self.layers.0.drop.training' was False and is True"),
    "shared settings": (lambda net: setattr(net.layers[0].config, "eps", 2.0), "eps' was 1.0 and is 2.0"),
    "entry of a list": (lambda net: net.factors.__setitem__(1, 5.0), "'self.factors.1' was 2.0 and is 5.0"),
    "longer list": (lambda net: net.factors.append(5.0), "'self.factors' had 2 entries and has 3"),
    "entry of a dict": (lambda net: net.options.update(twice=False), "'self.options.twice' was True and is False"),
    "nested dict": (lambda net: net.options["parts"].update(b=1), "'self.options.parts' has other keys"),
    "function attribute": (lambda net: setattr(net.layers[0], "activation", torch.tanh), "'self.layers.0.activation' was"),
    "submodule of another class": (lambda net: setattr(net.layers[0], "up", nn.Identity()), "'self.layers.0.up"),
    "appended submodule": (lambda net: net.layers.append(Layer(SETTINGS)), "'self.layers' has other keys"),
    "hook": (lambda net: net.layers[0].up.register_forward_hook(lambda *_: None), "'self.layers.0.up._forward_hooks' has entries now"),
    "pre-hook": (lambda net: net.layers[1].register_forward_pre_hook(lambda *_: None), "'self.layers.1._forward_pre_hooks' has entries"),
    "global": (set_global, "global 'SCALE' was 2.0 and is 3.0"),
    "entry of a global dict": (lambda _: TABLE.update(scale=3.0), "global 'TABLE.scale' was 2.0 and is 3.0"),
    "global object": (lambda _: SETTINGS.names.append("c"), "config.names' had 2 entries and has 3"),
    "one of two names of an object": (lambda net: setattr(net.layers[1], "config", Settings()), "is no longer tied to"),
    "global function": (replace_function, "global 'helper' was"),
    "defaults": (set_defaults, "global 'helper.__defaults__"),
    "closure cell": (set_cell, "cell_contents' was 3.0 and is 4.0"),
    "class attribute": (set_class_attribute, "limit' was 3 and is 4"),
    "buffer of another dtype": (lambda net: setattr(net.layers[0], "shift", torch.zeros(4).double()), "'self.layers.0.shift' was"),
}  # fmt: skip


@pytest.fixture(scope="module")
def guards() -> GuardSet:
    with torch.no_grad():
        return trace(Net().eval().forward, {"x": torch.ones(3, 4)}, {"x": {0: "rows"}}).guards


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    module = sys.modules[__name__]
    before = dict(vars(module)), dict(TABLE), dict(vars(SETTINGS)), helper.__defaults__
    yield Net().eval()
    vars(module).update(before[0])
    TABLE.update(before[1])
    SETTINGS.eps, SETTINGS.names = 1.0, ["a", "b"]
    helper.__defaults__ = before[3]
    scaled.__closure__[0].cell_contents = 3.0  # type: ignore[attr-defined]
    Net.limit = 3


def state_of(net: Any, guards: GuardSet, **options: Any) -> GuardState:
    return GuardState(guards, Roots(net.forward), **options)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_named(name: str, net: Any, guards: GuardSet) -> None:
    change, text = CHANGES[name]
    state = state_of(net, guards)
    assert state.unchanged()
    assert state.swept()
    assert state.violation() == ""
    change(net)
    assert not (state.unchanged() and state.swept())
    assert text in state.violation()


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "weight": lambda net: setattr(net.layers[0].up, "weight", nn.Parameter(torch.ones(4, 4))),
    "data": lambda net: setattr(net.layers[1].up.weight, "data", torch.ones(4, 4)),
    "submodule of the same class": lambda net: setattr(net.layers[0], "up", nn.Linear(4, 4)),
    "equal list": lambda net: setattr(net, "factors", [1.0, 2.0]),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_replacement_that_traces_alike_is_bound_anew(name: str, net: Any, guards: GuardSet) -> None:
    state = state_of(net, guards)
    REPLACEMENTS[name](net)
    assert not (state.unchanged() and state.swept())
    assert state.violation() == ""
    state.refresh()
    assert state.unchanged()
    assert state.swept()


def test_what_forward_does_not_read_is_not_guarded(net: Any, guards: GuardSet) -> None:
    state = state_of(net, guards)
    net.unread, net.layers[0].anything = 1, [1]
    net.register_forward_hook(lambda *_: None)  # runs around the compiled forward
    assert state.unchanged()
    assert guards.unknown == ()


def test_guards_pass_through_json(net: Any, guards: GuardSet) -> None:
    again = GuardSet.from_json(guards.to_json())
    assert again.guards == guards.guards
    assert again.violation(Roots(net.forward)) == ""


def test_dropped_kinds_are_not_checked(net: Any, guards: GuardSet) -> None:
    state = state_of(net, guards, dropped=("hooks", "value"))
    net.layers[0].up.register_forward_hook(lambda *_: None)
    assert state.violation() == ""
    assert {guard.kind for guard in state.guards.guards}.isdisjoint({Kind.HOOKS, Kind.VALUE})


def test_tensors_are_looked_at_in_parts(guards: GuardSet) -> None:
    many = nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)]).eval()
    with torch.no_grad():
        found = trace(many.forward, {"input": torch.ones(3, 2)}, {}).guards
    state = GuardState(found, Roots(many.forward))
    many[25].weight = nn.Parameter(torch.ones(2, 2))
    assert not all(state.swept() for _ in range(4))  # 100 tensors, 32 at a time
    state.refresh()
    many._apply(lambda tensor: tensor * 2)
    assert not state.swept()  # a conversion moves the first and the last, which are looked at each time


def test_a_tied_weight_that_is_untied() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    with torch.no_grad():
        found = trace(net.forward, {"input": torch.ones(3, 4)}, {}).guards
    net[1].weight = nn.Parameter(torch.ones(4, 4))
    assert "is no longer tied to" in found.violation(Roots(net.forward))


def test_free_function_with_a_variable_of_its_scope() -> None:
    function = closure(2.0)
    found = trace(function, {"x": torch.ones(3, 4)}, {}).guards
    state = GuardState(found, Roots(function))
    assert state.unchanged()
    function.__closure__[0].cell_contents = 5.0  # type: ignore[attr-defined]
    assert not state.unchanged()
    assert "'the function.__closure__.0.cell_contents' was 2.0 and is 5.0" in state.violation()


def test_a_path_that_is_gone_is_a_violation() -> None:
    from rung.compile.paths import Path

    guard = Guard(Kind.VALUE, Path("self", (("attr", "gone"),)), ["int", "1"])
    assert guard.violation({"self": types.SimpleNamespace()}) == "'self.gone' is gone"


def test_a_way_that_is_gone_when_guards_are_bound_is_named() -> None:
    function = closure(2.0)
    guards = trace(function, {"x": torch.ones(3, 4)}, {}).guards

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(GuardError, match=r"changed while it was compiled: 'the function.__closure__.0.cell_contents' is gone"):
        GuardState(guards, Roots(other))


def test_fields_of_a_dataclass_are_found_by_name() -> None:
    """As torch 2.11 on Python 3.12 names what it reads while a trace constructs a dataclass."""
    roots = Roots(helper)
    path = path_of("___dataclass_fields(G['Settings'])[0].default", roots)
    assert path is not None
    assert path.resolve(roots) == 1.0
    assert path_of("___dataclass_fields(G['TABLE'])[0].default", roots) is None
