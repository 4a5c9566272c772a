from __future__ import annotations

import json
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from rung.compile.sources import type_refs
from rung.compile.template import Recorder, render
from rung.errors import UnsupportedModuleError
from tests.compile.cases import STRUCTURES, Like, Structures, assert_same, uncompiled


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


@pytest.mark.parametrize("module", [ReturnsSet(), ReturnsLocalClass()], ids=["set", "local class"])
def test_structure_that_cannot_be_rebuilt_is_refused(module: nn.Module) -> None:
    with pytest.raises(UnsupportedModuleError, match="hint: "):
        uncompiled(module.forward, torch.zeros(3, 4))
