from __future__ import annotations

import json
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from rung.compile.sources import type_refs
from rung.compile.template import Recorder, render
from rung.errors import TraceError, UnsupportedModuleError
from tests.compile.cases import STRUCTURES, Level, Like, Structures, assert_same, uncompiled


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_structure_and_types_are_rebuilt(kind: str, rows: int) -> None:
    module = Structures(kind)
    compiled, _ = uncompiled(module.forward, torch.zeros(3, 4))
    x = torch.randn(rows, 4)
    assert_same(compiled(x), module(x))


@pytest.mark.parametrize("kind", STRUCTURES)
def test_template_is_json(kind: str) -> None:
    compiled, _ = uncompiled(Structures(kind).forward, torch.zeros(3, 4))
    assert json.loads(json.dumps(compiled.plan.template, allow_nan=True)) is not None


def test_returned_input_is_the_argument_itself() -> None:
    compiled, _ = uncompiled(Structures("returned input").forward, torch.zeros(3, 4))
    x = torch.randn(2, 4)
    assert compiled(x)[0] is x


class ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, self.weight


def test_returned_parameter_is_the_parameter_itself() -> None:
    module = ReturnsWeight()
    compiled, _ = uncompiled(module.forward, torch.zeros(3, 4))
    assert compiled(torch.ones(2, 4))[1] is module.weight


class ReturnsUnused(ReturnsWeight):
    """A parameter that nothing in forward computes with, or a view of the argument, in ways that a graph has and has not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, {
            "parameter": lambda: self.weight,
            "T": lambda: x.T,
            "mT": lambda: x.mT,
            "data": lambda: x.data,
            "clone": lambda: self.weight.clone(),
            "t": lambda: x.t(),
            "transpose": lambda: x.transpose(-2, -1),
            "detach": lambda: x.detach(),
        }[self.kind]()


@pytest.mark.parametrize("kind", ["parameter", "T", "mT", "data"])
def test_tensor_that_is_not_in_the_graph_is_answered_with_what_to_write(kind: str) -> None:
    module = ReturnsUnused(kind)
    if kind in ("T", "mT") and torch.__version__ >= "2.14":  # in its graphs
        compiled, _ = uncompiled(module.forward, torch.zeros(3, 4))
        x = torch.randn(2, 4)
        assert_same(compiled(x), module(x))
        return
    said = r"(?s)at output\[1\] that .*hint: .*x.clone\(\).*x.t\(\), x.transpose\(-2, -1\), x.detach\(\)"
    with pytest.raises(UnsupportedModuleError, match=said):
        uncompiled(module.forward, torch.zeros(3, 4))


@pytest.mark.parametrize("kind", ["clone", "t", "transpose", "detach"])
def test_what_the_hint_of_such_a_tensor_says_works(kind: str) -> None:
    module = ReturnsUnused(kind)
    compiled, _ = uncompiled(module.forward, torch.zeros(3, 4))
    x = torch.randn(2, 4)
    assert_same(compiled(x), module(x))


class ReturnsSet(nn.Module):
    def forward(self, x: torch.Tensor) -> set[str]:
        x + 1
        return {"a"}


class ReturnsLocalClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import dataclasses

        @dataclasses.dataclass
        class Local:
            value: torch.Tensor

        self.make = Local

    def forward(self, x: torch.Tensor) -> object:
        return self.make(x + 1)


def test_the_default_of_a_defaultdict_is_found_by_its_name() -> None:
    template = Recorder(outputs={}, integers={}, inputs={}).record(defaultdict(Like, a=1))
    assert [ref.qualname for ref in type_refs(template)] == ["Like"]
    bound: list[object] = []
    source = render(template, [], [], lambda value: (bound.append(value), f"bound[{len(bound) - 1}]")[1])
    assert eval(source, {"bound": bound}) == {"a": 1}
    assert eval(source, {"bound": bound})["b"] == Like()


class Named(OrderedDict[str, torch.Tensor]):
    def __init__(self, name: str, **items: torch.Tensor) -> None:
        super().__init__(**items)
        self.name = name


class ReturnsMapping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> object:
        return defaultdict(lambda: 0, a=x + 1) if self.kind == "defaultdict" else Named("scores", a=x + 1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("defaultdict", r"a defaultdict at output, whose default <function .* has no name under which it can be found again\nhint: "),
        ("Named", r"a Named at output, which cannot be made from a dict of its items\nhint: return dict\(\.\.\.\) of it"),
    ],
)
def test_a_mapping_that_cannot_be_rebuilt_is_refused_by_name(kind: str, text: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=text):
        uncompiled(ReturnsMapping(kind).forward, torch.zeros(3, 4))


class ReturnsMemberAsKey(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[Level, torch.Tensor]:
        return {Level.HIGH: x + 1}


REFUSED = {
    "set": ReturnsSet(),
    "local class": ReturnsLocalClass(),
    "key that is a member": ReturnsMemberAsKey(),
}


@pytest.mark.parametrize("module", REFUSED.values(), ids=REFUSED)
def test_structure_that_cannot_be_rebuilt_is_refused(module: nn.Module) -> None:
    with pytest.raises(UnsupportedModuleError, match="hint: "):
        uncompiled(module.forward, torch.zeros(3, 4))


class ReturnsOfSize(nn.Module):
    """Returns what the host computes from the number of rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> tuple[object, ...]:
        y, rows = x + 1, x.shape[0]
        if self.kind == "text":
            return y, f"rows={rows}"
        if self.kind == "key":
            return y, {f"rows={rows}": y}
        if self.kind == "half":
            return y, [1, rows / 2]
        if self.kind == "float":
            return y, {"rows": float(rows)}
        return y, f"{rows % 2 == 0}"


OF_SIZE = {
    "text": r"a str at output\[1\]",
    "key": r"the keys of output\[1\]",
    "half": r"a float at output\[1\]\[1\]",
    "float": r"a float at output\[1\]\['rows'\]",
    "bool": r"a str at output\[1\]",
}


@pytest.mark.parametrize("kind", OF_SIZE)
def test_what_the_host_computes_from_a_size_is_refused_by_place(kind: str) -> None:
    found = f"((makes {OF_SIZE[kind]} from|decides on) the size "  # torch 2.11 finds out while it traces
    found += "|could not be traced .*hashable)" if kind == "key" else ")"  # and 2.12 takes no such key
    with pytest.raises((UnsupportedModuleError, TraceError), match=f"(?s)ReturnsOfSize.forward {found}.*hint: "):
        uncompiled(ReturnsOfSize(kind).forward, torch.zeros(3, 4))
