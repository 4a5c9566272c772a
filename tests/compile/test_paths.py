from __future__ import annotations

import pytest
import torch
from torch import nn

from rung.compile.paths import Path, parse_path
from rung.errors import UnsupportedModuleError
from tests.compile.cases import Net

PARSED = {
    "L['x']": Path("x"),
    "L['x'].size()[1]": Path("x", (), 1),
    "L['self']._modules['linear']._parameters['weight']": Path(
        "self", (("attr", "_modules"), ("item", "linear"), ("attr", "_parameters"), ("item", "weight"))
    ),
    "L['batch']['ids'][0].rows": Path("batch", (("item", "ids"), ("item", 0), ("attr", "rows"))),
    "L['self'].table.size()[0]": Path("self", (("attr", "table"),), 0),
}


@pytest.mark.parametrize("source", PARSED)
def test_source_expression_is_parsed(source: str) -> None:
    assert parse_path(source) == PARSED[source]


@pytest.mark.parametrize("source", ["G['x']", "L[f()]", "f(L['x'])", "L['x'].numel()", "L['x'].size(0)[0]", "x", "L['x'", "L['x'][y]"])
def test_other_source_is_refused_with_a_hint(source: str) -> None:
    with pytest.raises(UnsupportedModuleError, match="hint: "):
        parse_path(source)


@pytest.mark.parametrize("source", PARSED)
def test_json_round_trip(source: str) -> None:
    path = parse_path(source)
    assert Path.from_json(path.to_json()) == path


def test_resolves_a_weight_of_a_submodule() -> None:
    net = Net()
    path = parse_path("L['self']._modules['linear']._parameters['weight']")
    assert path.resolve({"self": net}) is net.linear.weight
    assert path.dotted() == "self.linear.weight"


def test_resolves_a_size() -> None:
    assert parse_path("L['x'].size()[1]").resolve({"x": torch.zeros(2, 5)}) == 5


@pytest.mark.parametrize("source", PARSED)
def test_expression_reads_what_resolve_reads(source: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = torch.zeros(4)

    class Rows:
        rows = torch.ones(3)

    names = {"x": torch.zeros(2, 3), "self": Holder(), "batch": {"ids": [Rows()]}}
    path = parse_path(source)
    value = eval(path.expression(), names)
    assert value is path.resolve(names) or value == path.resolve(names)
