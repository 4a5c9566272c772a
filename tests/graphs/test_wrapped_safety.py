"""Wrapped modules: who owns outputs, and tensors that are replaced after the capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.counters import Count
from rung.errors import AddressChangedError, InputMismatchError

ROWS = {"x": {0: "rows"}}


class Two(nn.Module):
    """Two outputs and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x), "x": x, "weight": self.linear.weight.t()}


def wrapped(**options: Any) -> Any:
    return rung.wrap(Two().requires_grad_(False), dynamic=ROWS, maximum=8, **{"graphs": "full", **options})


@pytest.mark.parametrize("graphs", ["none", "piecewise", "full"])
def test_outputs_go_into_the_callers_tensors(graphs: str) -> None:
    module = wrapped(graphs=graphs)
    out = {"y": torch.zeros(3, 4), "x": None, "weight": torch.zeros(4, 4)}
    x = torch.randn(3, 4)
    assert module.rung.into(out)(x) is out
    torch.testing.assert_close(out["y"], module.linear(x))
    assert torch.equal(out["weight"], module.linear.weight.t())
    with torch.no_grad():
        module.rung.into(out)(x * 2)
    torch.testing.assert_close(out["y"], module.linear(x * 2))


def test_outputs_of_a_padded_size_are_cut_into_the_callers_tensors() -> None:
    module = wrapped(pad=("rows",))
    y, x = torch.zeros(5, 4), torch.randn(5, 4)
    module.rung.into([y, None, None])(x)
    torch.testing.assert_close(y, module.linear(x))


def test_a_target_of_another_shape_is_refused_and_nothing_is_written() -> None:
    module = wrapped()
    y, weight = torch.zeros(3, 4), torch.zeros(4, 3)
    with pytest.raises(InputMismatchError, match=r"target 2 is torch.float32 \[4, 3\], the output is torch.float32 \[4, 4\]"):
        module.rung.into([y, None, weight])(torch.randn(3, 4))
    assert torch.equal(y, torch.zeros(3, 4))


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_a_target_that_is_no_tensor_is_refused(graphs: str) -> None:
    module = wrapped(graphs=graphs)
    with pytest.raises(InputMismatchError, match=r"target 0 is 'x', the output is torch.float32 \[3, 4\]"):
        module.rung.into(["x", None, None])(torch.randn(3, 4))


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_weights_may_be_swapped(graphs: str) -> None:
    """`torch.utils.swap_tensors` refuses a tensor that anything refers to weakly."""
    module, x = wrapped(graphs=graphs), torch.randn(3, 4)
    module(x)
    torch.utils.swap_tensors(module.linear.weight, nn.Parameter(torch.ones(4, 4), requires_grad=False))
    torch.testing.assert_close(module(x)["y"], x.sum(1, keepdim=True).expand(3, 4) + module.linear.bias)


@pytest.mark.parametrize("policy", ["clone", "borrow"])
def test_an_output_that_is_an_argument_stays_the_callers(policy: str) -> None:
    """T29."""
    module = wrapped(outputs=policy)
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    kept = module(first)
    copy = {key: value.clone() for key, value in kept.items()}
    module(second)
    assert kept["x"] is first
    assert torch.equal(kept["weight"], copy["weight"])
    assert torch.equal(kept["y"], copy["y"]) is (policy == "clone")


def test_a_cloned_view_of_a_parameter_is_not_the_parameter() -> None:
    """T29."""
    module = wrapped()
    kept = module(torch.randn(3, 4))["weight"]
    values = kept.clone()
    module.linear.weight.zero_()
    assert torch.equal(kept, values)


@pytest.mark.parametrize("told", [False, True])
def test_replaced_weights_are_captured_again_by_default(told: bool) -> None:
    """T34."""
    module, x = wrapped(), torch.randn(3, 4)
    module(x)
    module.linear.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    if told:
        module.rung.weights_changed()
    torch.testing.assert_close(module(x)["y"], module.linear(x))
    counters = module.rung.counters
    assert (counters[Count.CAPTURES], counters[Count.ADDRESS_CHANGES], counters[Count.DYNAMO_TRACES]) == (2, 1, 1)


@pytest.mark.parametrize("told", [False, True])
def test_replaced_weights_raise_by_policy_until_release(told: bool) -> None:
    """T34."""
    module, x = wrapped(on_address_change="raise"), torch.randn(3, 4)
    module(x)
    module.linear.weight.data = torch.ones(4, 4)
    for _ in range(2):
        with pytest.raises(AddressChangedError, match=r"'linear\.weight'"):
            module.rung.weights_changed() if told else module(x)
    module.rung.release()
    torch.testing.assert_close(module(x)["y"], module.linear(x))


def test_replaced_weights_run_without_graphs_by_policy() -> None:
    """T34."""
    module, x = wrapped(on_address_change="none"), torch.randn(3, 4)
    module(x)
    module.linear.weight.data = torch.ones(4, 4)
    for _ in range(2):
        torch.testing.assert_close(module(x)["y"], module.linear(x))
    assert module.rung.counters["step.none.address_changed"] == 2


def test_values_loaded_in_place_need_no_capture() -> None:
    """T34."""
    module, x = wrapped(on_address_change="raise"), torch.randn(3, 4)
    module(x)
    module.load_state_dict(Two().state_dict())
    torch.testing.assert_close(module(x)["y"], module.linear(x))
    assert module.rung.counters[Count.CAPTURES] == 1
