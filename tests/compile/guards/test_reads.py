"""What a trace reads and Dynamo does not note: each case changes it and looks at the guards. Nothing is compiled here."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rung.compile.guards import GuardSet, GuardState, Kind, Roots
from rung.compile.trace import trace


class Config:
    def __init__(self) -> None:
        self.a, self.b = 2.0, [1.0, 2.0]


CONFIG, LIST, TABLE = Config(), [1.0, 2.0], {"a": 1.0, ("t", 1): 2.0, b"b": 3.0}
HOLDER = types.SimpleNamespace(config=CONFIG)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def other_scale(x: torch.Tensor) -> torch.Tensor:
    return x * 5


class Module(nn.Module):
    """Reads an object by two names, and functions through its class."""

    limit = 2.0

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.config, self.items, self.table = CONFIG, LIST, TABLE
        self.weight = nn.Parameter(torch.ones(4))
        self.body = forward

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x + 2

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 3

    @property
    def twice(self) -> float:
        return self.config.a * 2

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def attribute_first(self: Any, x: torch.Tensor) -> Any:
    return x * self.config.a + CONFIG.b[0]


def global_first(self: Any, x: torch.Tensor) -> Any:
    return x * CONFIG.a + self.config.b[0]


def a_list(self: Any, x: torch.Tensor) -> Any:
    return x * self.items[0] + LIST[1]


def a_dict(self: Any, x: torch.Tensor) -> Any:
    return x * self.table["a"] + TABLE["a"]


def through_a_holder(self: Any, x: torch.Tensor) -> Any:
    return x * self.config.a + HOLDER.config.b[0]


def through_the_class(self: Any, x: torch.Tensor) -> Any:
    return self.static(self.of_class(self.method(x))) * self.twice * self.limit


def a_function(self: Any, x: torch.Tensor) -> Any:
    return scale(x)


def the_environment(self: Any, x: torch.Tensor) -> Any:
    return x * 2 if "RUNG_TEST_FLAG" in os.environ else x * float(os.environ.get("RUNG_TEST_FACTOR", "3"))


def the_gradient_mode(self: Any, x: torch.Tensor) -> Any:
    return x * 2 if torch.is_grad_enabled() else x


def a_wish_for_gradients(self: Any, x: torch.Tensor) -> Any:
    return x * 2 if self.weight.requires_grad else x * self.weight


def odd_keys(self: Any, x: torch.Tensor) -> Any:
    return x * self.table[("t", 1)] + self.table[b"b"]


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: globals().__setitem__(name, value)


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], str]] = {
    "global behind an attribute": (attribute_first, set_global("CONFIG", Config()), "global 'CONFIG' is no longer tied to 'self.config'"),
    "attribute behind a global": (global_first, lambda m: setattr(m, "config", Config()), "'self.config' is no longer tied to global"),
    "list": (a_list, set_global("LIST", [1.0, 7.0]), "global 'LIST' is no longer tied to 'self.items'"),
    "dict": (a_dict, set_global("TABLE", {"a": 7.0}), "global 'TABLE' is no longer tied to 'self.table'"),
    "attribute of a global": (through_a_holder, lambda _: setattr(HOLDER, "config", Config()), "'HOLDER.config' is no longer tied"),
    "method": (through_the_class, lambda _: setattr(Module, "method", other_scale), "method' was"),
    "class method": (through_the_class, lambda _: setattr(Module, "of_class", classmethod(lambda _, x: x)), "of_class' was"),
    "static method": (through_the_class, lambda _: setattr(Module, "static", staticmethod(other_scale)), "static.__func__' was"),
    "property": (through_the_class, lambda _: setattr(Module, "twice", property(lambda _: 7.0)), "twice.fget' was"),
    "data of the class": (through_the_class, lambda m: m.__dict__.update(limit=7.0), "gained the attribute 'limit'"),
    "edited code": (a_function, lambda _: setattr(scale, "__code__", other_scale.__code__), "global 'scale' was"),
    "class of an object": (attribute_first, lambda m: setattr(m.config, "__class__", type("Other", (Config,), {})), "was an object of"),
    "variable that appears": (the_environment, lambda _: os.environ.update(RUNG_TEST_FLAG="1"), "gained the entry 'RUNG_TEST_FLAG'"),
    "variable with a default": (the_environment, lambda _: os.environ.update(RUNG_TEST_FACTOR="5"), "gained the entry 'RUNG_TEST_FACTOR'"),
    "gradient mode": (the_gradient_mode, lambda _: torch.set_grad_enabled(False), "torch.is_grad_enabled'() was True and is False"),
    "requires_grad": (a_wish_for_gradients, lambda m: m.requires_grad_(False), "requires_grad' was True and is False"),
    "key that is a tuple": (odd_keys, lambda m: m.table.update({("t", 1): 7.0}), "was 2.0 and is 7.0"),
    "key of bytes": (odd_keys, lambda m: m.table.update({b"b": 7.0}), "was 3.0 and is 7.0"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CONFIG", "LIST", "TABLE"):
        monkeypatch.setitem(globals(), name, globals()[name])
    for name in ("method", "of_class", "static", "twice"):
        monkeypatch.setattr(Module, name, vars(Module)[name])
    monkeypatch.setattr(HOLDER, "config", CONFIG)
    monkeypatch.setattr(scale, "__code__", scale.__code__)
    table, cls = dict(TABLE), type(CONFIG)
    for name in ("RUNG_TEST_FLAG", "RUNG_TEST_FACTOR"):
        monkeypatch.delenv(name, raising=False)
    config = CONFIG
    yield
    torch.set_grad_enabled(True)
    config.__class__ = cls
    TABLE.update(table)
    for name in ("RUNG_TEST_FLAG", "RUNG_TEST_FACTOR"):
        os.environ.pop(name, None)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_named(name: str) -> None:
    body, change, text = CHANGES[name]
    module = Module(body)
    guards = trace(module.forward, {"x": torch.ones(3, 4)}, {}).guards
    assert guards.unknown == ()
    assert GuardSet.from_json(guards.to_json()) == guards
    state = GuardState(guards, Roots(module.forward))
    assert state.unchanged()
    assert state.all_swept()
    assert state.violation() == ""
    change(module)
    assert not (state.unchanged() and state.swept())
    assert text in state.violation()


def test_a_variable_that_is_set_is_compared_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_TEST_FACTOR", "5")
    module = Module(the_environment)
    state = GuardState(trace(module.forward, {"x": torch.ones(3, 4)}, {}).guards, Roots(module.forward))
    assert state.unchanged()
    monkeypatch.setenv("RUNG_TEST_FACTOR", "6")
    assert not state.unchanged()
    assert "was b'5' and is b'6'" in state.violation()


def test_names_that_are_not_shared_are_left_alone() -> None:
    module = Module(lambda self, x: x * self.config.a)
    guards = trace(module.forward, {"x": torch.ones(3, 4)}, {}).guards
    assert Kind.TIED not in {guard.kind for guard in guards.guards}
    state = GuardState(guards, Roots(module.forward))
    module.items = [3.0]
    set_global("LIST", [5.0])(None)
    assert state.unchanged()
