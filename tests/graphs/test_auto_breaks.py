"""Regions that will not trace, together with recorded graphs: they run between captured pieces and are never captured."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.compile.bound import Capture
from rung.counters import Count
from rung.errors import PaddingError

ROWS = {"x": {0: "rows"}}
STREAM = io.StringIO()
HOST = {"factor": 2.0}


class Decides(nn.Module):
    """Python that depends on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else -x


def by_the_host(x: torch.Tensor) -> torch.Tensor:
    """What a graph would freeze, and numpy in between."""
    print(HOST["factor"], file=STREAM)
    return torch.from_numpy(x.numpy() * HOST["factor"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decides = Decides()
        self.register_buffer("calls", torch.zeros(1))

    def note(self, x: torch.Tensor) -> None:
        self.calls.add_(1 if x.mean().item() < 1e9 else 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        self.note(y)
        y = self.decides(y - 0.5) * 2
        return self.last(by_the_host(y)) + 1


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.mark.parametrize("outputs", ["clone", "borrow"])
@pytest.mark.parametrize("graphs", ["piecewise", "full", "auto"])
def test_regions_stay_fresh_between_graphs(graphs: str, outputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("compiled", "loaded"):
        eager = net()
        module: Any = rung.wrap(net(), dynamic=ROWS, breaks="auto", graphs=graphs, outputs=outputs)
        for number, (rows, sign) in enumerate([(3, 1), (3, -1), (2, 1), (3, 1), (2, -1)]):
            monkeypatch.setitem(HOST, "factor", 2.0 + number)
            x = torch.randn(rows, 4) * sign * 3
            torch.testing.assert_close(module(x), eager(x))
            assert torch.equal(module.calls, eager.calls)
        (report,) = module.rung.report()
        assert report["source"] == source
        assert module.rung.counters[Count.CAPTURES] == 2
        assert module.rung.counters[Count.REPLAYS] >= 5
        assert {one["name"] for one in report["breaks"]} == {"note", "decides", "by_the_host"}


def test_no_mode_captures_a_region() -> None:
    module: Any = rung.wrap(net(), dynamic=ROWS, breaks="auto", graphs="full")
    module(torch.ones(3, 4))
    (variant,) = module.rung._entry.variants.values()
    kinds = {step.name: step.capture for step in variant.compiled.steps if step.kind == "break"}
    assert set(kinds.values()) == {Capture.NEVER}
    assert len(kinds) == 3
    program = variant.run._manager.program(variant.run._manager.captured[0])
    assert program.num_graphs == 4  # a graph before, between and behind them
    assert module.rung.last_step()["reason"] == "host_break"


def test_a_copy_has_regions_of_its_own() -> None:
    module: Any = rung.wrap(net(), dynamic=ROWS, breaks="auto", graphs="full")
    x = torch.ones(3, 4)
    before = module(x)
    other = copy.deepcopy(module)
    other.decides.forward = lambda x: x * 0
    other.last.bias.fill_(5.0)
    torch.testing.assert_close(other(x), torch.full((3, 4), 6.0))
    torch.testing.assert_close(module(x), before)


def by_the_size(x: torch.Tensor) -> torch.Tensor:
    """What a trace with a free size cannot decide."""
    return x * 2 if x.shape[0] > 1 else x * 3


class BySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_the_size(self.first(x)) + 1


def by_size() -> BySize:
    torch.manual_seed(0)
    return BySize().eval().requires_grad_(False)


def test_rows_of_a_region_are_not_proved_to_be_independent() -> None:
    module: Any = rung.wrap(by_size(), dynamic=ROWS, breaks="auto", graphs="auto", pad=("rows",))
    with pytest.raises(PaddingError, match=r"not proved to be independent: by_the_size .*test_auto_breaks.py.* would not trace"):
        module(torch.ones(3, 4))


def test_a_run_decides_on_the_rows_of_a_region_when_that_is_asked_for() -> None:
    eager: Any = by_size()
    module: Any = rung.wrap(by_size(), dynamic=ROWS, breaks="auto", graphs="auto", pad=("rows",), pad_unproved=True)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x), eager(x))
    assert module.rung.counters[Count.UNPROVED_PADDING] > 0
