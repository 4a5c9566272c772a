from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rung.compile.fingerprint import fingerprint
from tests.compile.cases import Child, Net


def of(change: Callable[[Net], Any] | None = None, **options: Any) -> dict[str, Any]:
    module = Net(**options)
    if change is not None:
        change(module)
    return fingerprint(module)[0]


def test_equal_modules_are_equal() -> None:
    assert of() == of()


def test_values_of_weights_do_not_count() -> None:
    assert of(lambda net: net.linear.weight.data.zero_()) == of()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "number": lambda net: setattr(net.norm, "eps", 0.5),
    "dtype": lambda net: net.double(),
    "layout": lambda net: setattr(net.linear, "weight", nn.Parameter(net.linear.weight.detach().t().contiguous().t())),
    "no bias": lambda net: setattr(net.linear, "bias", None),
    "mode": lambda net: net.eval(),
    "mode of a submodule": lambda net: net.norm.eval(),
    "hook": lambda net: net.linear.register_forward_hook(lambda *_: None),
    "new attribute": lambda net: setattr(net, "extra", ("a", {"b": 1.5})),
    "function": lambda net: setattr(net, "function", functools.partial(torch.sum, dim=0)),
    "class of a submodule": lambda net: setattr(net, "norm", nn.Identity()),
    "tied": lambda net: setattr(net.norm, "bias", net.norm.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_counts(change: str) -> None:
    assert of(CHANGES[change]) != of()


@pytest.mark.parametrize("options", [{"bias": False}, {"activation": "tanh"}, {"epsilon": 0.1}, {"hidden": 32}])
def test_configuration_counts(options: dict[str, Any]) -> None:
    assert of(**options) != of()


def test_attribute_that_cannot_be_described_is_named() -> None:
    module = Net()
    module.strange = iter(())
    assert fingerprint(module)[1] == [".strange"]


def test_attribute_that_refers_to_itself() -> None:
    module = Child()
    module.items = [1]
    module.items.append(module.items)
    assert fingerprint(module)[0] == fingerprint(module)[0]


def test_attribute_excluded_by_the_class() -> None:
    class Excluding(nn.Module):
        rung_unread_attributes = ("cache",)

        def __init__(self, cache: object) -> None:
            super().__init__()
            self.cache = cache

    assert fingerprint(Excluding(1)) == fingerprint(Excluding(object()))


def test_number_of_the_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "factor", 2.0, raising=False)
    two = of()
    monkeypatch.setattr(Net, "factor", 3.0)
    assert of() != two


def test_submodule_called_tied_counts() -> None:
    assert of(lambda net: setattr(net, "tied", nn.Linear(2, 2))) != of(lambda net: setattr(net, "tied", nn.ReLU()))


def test_hooks_of_saving_and_loading_are_not_read_by_a_forward() -> None:
    plain, hooked = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)
    hooked.register_state_dict_pre_hook(lambda *arguments: None)
    assert fingerprint(plain) == fingerprint(hooked)
    hooked.register_forward_hook(lambda module, arguments, output: output)
    assert fingerprint(plain) != fingerprint(hooked)
