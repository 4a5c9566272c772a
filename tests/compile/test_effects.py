from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rung.compile.effects import refuse_side_effects
from rung.compile.trace import trace
from rung.errors import UnsupportedModuleError
from tests.compile.cases import Child

CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "number": ("count", lambda module: setattr(module, "count", 1)),
    "new": ("fresh", lambda module: setattr(module, "fresh", 1)),
    "list": ("items", lambda module: module.items.append(1)),
    "dict": ("table", lambda module: module.table.update(a=1)),
    "set": ("names", lambda module: module.names.add("a")),
    "parameter": ("net.linear.weight", lambda module: setattr(module.net.linear, "weight", None)),
    "buffer": ("net.state", lambda module: setattr(module.net, "state", torch.ones(1))),
    "submodule": ("net.norm", lambda module: setattr(module.net, "norm", torch.nn.Identity())),
}


def make() -> Any:
    module: Any = Child()
    module.count, module.items, module.table, module.names = 0, [0], {"b": 0}, {"b"}
    module.net.register_buffer("state", torch.zeros(1))
    return module


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_named_and_put_back(change: str) -> None:
    module = make()
    name, apply = CHANGES[change]
    before = (module.count, list(module.items), dict(module.table), set(module.names), list(module.state_dict()), hasattr(module, "fresh"))
    weight = module.net.linear.weight
    with pytest.raises(UnsupportedModuleError, match=f"assigns the attribute '{name}'"), refuse_side_effects(module, "forward"):
        apply(module)
    after = (module.count, module.items, module.table, module.names, list(module.state_dict()), hasattr(module, "fresh"))
    assert after == before
    assert module.net.linear.weight is weight


def test_update_in_place_is_no_change_of_an_attribute() -> None:
    module = make()
    with refuse_side_effects(module, "forward"):
        module.net.state.add_(1)
    assert module.net.state.item() == 1


def test_function_has_no_attributes() -> None:
    with refuse_side_effects(None, "function"):
        pass


class Ambient:
    """A context variable as libraries make them traceable: an attribute that is set and reset."""

    def __init__(self) -> None:
        self.value: int | None = None


AMBIENT = Ambient()


def sets_and_resets(x: torch.Tensor) -> torch.Tensor:
    AMBIENT.value = 1
    y = x + AMBIENT.value
    AMBIENT.value = None
    return y


def only_sets(x: torch.Tensor) -> torch.Tensor:
    AMBIENT.value = 1
    return x + AMBIENT.value


def test_what_is_set_and_reset_is_no_side_effect() -> None:
    assert trace(sets_and_resets, {"x": torch.ones(2)}, {}).inputs


def test_what_stays_set_is_refused_and_put_back() -> None:
    with pytest.raises(UnsupportedModuleError, match="AMBIENT"):
        trace(only_sets, {"x": torch.ones(2)}, {})
    assert AMBIENT.value is None
