"""Regions that will not trace become breaks: `breaks="auto"`."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.compile.auto_break import trace_with_breaks
from rung.errors import ConfigError, OutputMismatchError, TraceError
from tests.compile.cases import assert_same

ROWS = {"x": {0: "rows"}}
STREAM = io.StringIO()


class Decides(nn.Module):
    """Python that depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight if x.sum().item() > 0 else x.t().contiguous().t() - self.weight


def in_words(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A C extension that nobody can trace, and memory of the argument in the result."""
    STREAM.write(f"{scale}")
    return x[:, :2], torch.tensor([scale])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(2, 2)
        self.middle = Decides()
        self.register_buffer("calls", torch.zeros(1))

    def note(self, x: torch.Tensor) -> None:
        print("mean", x.mean().item(), file=STREAM)
        x.add_(1)
        self.calls.add_(1)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        self.note(y)
        left, scale = in_words(self.middle(y * 2), 3.0)
        return {"left": self.last(left), "scale": scale * 2, "rows": y.shape[0]}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def calls() -> list[torch.Tensor]:
    return [torch.randn(rows, 4) * sign for rows, sign in ((4, 1), (2, -1), (1, 1))]


def test_stitched_equals_eager_cold_and_warm(calls: list[torch.Tensor]) -> None:
    for source in ("compiled", "loaded"):
        eager, module = net(), rung.wrap(net(), dynamic=ROWS, breaks="auto")
        with torch.no_grad():
            for x in calls:
                assert_same(module(x.clone()), eager(x.clone()))
                assert torch.equal(module.calls, eager.calls)  # runs for the trace leave no mark
        (report,) = module.rung.report()
        assert report["source"] == source, report["reason"]
        assert [name.partition("_")[0] for name in report["steps"]] == ["piece", "note", "piece", "in", "piece"]
        assert {one["name"] for one in report["breaks"]} == {"note", "middle", "in_words"}
        assert all("test_auto_break.py" in one["where"] and one["reason"] for one in report["breaks"])
        assert "note runs eagerly at " in module.rung.explain()
        module.middle.weight.add_(1)  # a region reads the module as it is
        eager.middle.weight.add_(1)
        with torch.no_grad():
            assert_same(module(calls[0].clone()), eager(calls[0].clone()))


def test_it_is_off_by_default(calls: list[torch.Tensor]) -> None:
    with pytest.raises(TraceError, match=r"could not be traced as one graph at .*test_auto_break.py"):
        rung.wrap(net(), dynamic=ROWS)(calls[0])
    with pytest.raises(ConfigError, match="breaks must be one of explicit, auto"):
        rung.wrap(net(), breaks="all")


class Drops(nn.Module):
    """As many rows as there are positive ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row for row in x if row.sum().item() > 0])


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drops = Drops()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drops(x) * 2


def test_a_size_that_depends_on_values_is_found_at_the_call() -> None:
    module = rung.wrap(Rows(), dynamic=ROWS, breaks="auto")
    x = torch.ones(3, 4)
    assert torch.equal(module(x), x * 2)
    x[1] = -1
    with pytest.raises(
        OutputMismatchError, match=r"drops.*returned torch.float32 cpu \[2, 4\] where torch.float32 cpu \[3, 4\] was expected"
    ):
        module(x)


class Inline(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(x.mean().item(), file=STREAM)
        return x * 2


def test_what_lies_in_the_function_itself_is_still_an_error() -> None:
    with pytest.raises(TraceError, match="could not be traced"):
        trace_with_breaks(Inline().forward, {"x": torch.ones(3, 4)}, ROWS)


def by_the_value(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x * 3


class ByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_the_value(x) + 1


def test_a_module_of_two_names_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script is `__main__` and `__mp_main__`: what stood there during the trace must not be among the guards."""
    monkeypatch.setitem(sys.modules, "the_same_by_another_name", sys.modules[__name__])
    traced = trace_with_breaks(ByValue().forward, {"x": torch.ones(3, 4)}, ROWS)
    assert [region.holder for region in traced.regions.values()] == [f"<module {__name__}>"]
    assert not any("by_the_value" in guard.name for guard in traced.guards.guards)
    module = rung.wrap(ByValue().eval(), dynamic=ROWS, breaks="auto")
    for x in (torch.ones(3, 4), -torch.ones(2, 4)):
        assert torch.equal(module(x), ByValue()(x))


def by_the_sum(x: torch.Tensor) -> torch.Tensor:
    """It traces, but no compiled code can hold the number."""
    return x * float(x.sum().item())


class BySum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_the_sum(self.first(x)) + 1


def test_a_function_that_reads_a_value_becomes_a_break() -> None:
    torch.manual_seed(0)
    eager: Any = BySum().eval().requires_grad_(False)
    torch.manual_seed(0)
    module: Any = rung.wrap(BySum().eval().requires_grad_(False), dynamic=ROWS, breaks="auto")
    for x in (torch.randn(3, 4), torch.randn(5, 4)):
        torch.testing.assert_close(module(x), eager(x))
    (report,) = module.rung.report()
    assert [one["name"] for one in report["breaks"]] == ["by_the_sum"]
    assert report["breaks"][0]["reason"] == "it reads a value of a tensor on the host"


class ReadsInline(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().item())


@pytest.mark.parametrize(("net", "breaks"), [(BySum, "explicit"), (ReadsInline, "explicit"), (ReadsInline, "auto")])
def test_a_value_that_is_read_on_the_host_is_an_error_with_its_line(net: type[nn.Module], breaks: Any) -> None:
    module = rung.wrap(net().eval().requires_grad_(False), dynamic=ROWS, breaks=breaks)
    with pytest.raises(TraceError, match=r"test_auto_break.py:\d+ \(return x \* float.*reads a value of a tensor on the host") as caught:
        module(torch.ones(3, 4))
    assert "rung.eager_break" in str(caught.value)


class Holder:
    """No module."""

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class Branches(nn.Module):
    """Decisions on a value in other places than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.holder = by_the_value, Holder()

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    @torch.no_grad()
    def decorated(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    @property
    def trouble(self) -> None:
        raise AssertionError("nobody reads it")

    def with_list(self, x: torch.Tensor, factors: list[float]) -> torch.Tensor:
        return x * factors[0] if x.sum() > 0 else x * 3

    def in_dict(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * 2 if x.sum() > 0 else x * 3}


class Calls(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.parts = how, nn.ModuleList([Branches()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.parts[0]
        assert isinstance(part, Branches)
        if self.how == "holder":
            return part.holder.branch(x + 1) - 1
        if self.how == "with_list":
            return part.with_list(x + 1, [2.0]) - 1
        if self.how == "in_dict":
            return part.in_dict(x + 1)["y"] - 1
        if self.how == "unbound":
            return Branches.branch(part, x + 1) - 1
        if self.how == "local":

            def inside(x: torch.Tensor) -> torch.Tensor:
                return x * 2 if x.sum() > 0 else x * 3

            return inside(x + 1) - 1
        return getattr(part, self.how)(x + 1) - 1  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["branch", "decorated", "static", "of_class", "act"])
def test_methods_and_functions_of_a_submodule_become_breaks(how: str) -> None:
    for source in ("compiled", "loaded"):
        module, eager = rung.wrap(Calls(how), dynamic=ROWS, breaks="auto"), Calls(how)
        for x in (torch.ones(3, 4), -2 * torch.ones(2, 4), torch.ones(1, 4)):
            assert torch.equal(module(x), eager(x))
        (report,) = module.rung.report()
        assert (report["source"], len(report["steps"])) == (source, 3)
        (one,) = report["breaks"]
        assert one["name"] == how
        assert not one["reason"].startswith(("if ", "return"))  # the reason, not the line


WHY = {
    "holder": "branch is neither a method of a submodule nor a function under its name in test_auto_break.py",
    "local": "inside is neither a method of a submodule nor",
    "unbound": "branch was not reached by that name",
    "with_list": "with_list takes a list; tensors, numbers, strings and None",
    "in_dict": "in_dict returns a dict; a tensor, ",
}


@pytest.mark.parametrize("how", WHY)
def test_what_cannot_be_a_break_says_why_and_what_to_decorate(how: str) -> None:
    with pytest.raises(
        TraceError,
        match=rf"(?s)test_auto_break.py:\d+ .*it is no automatic break: {WHY[how]}.*hint: .*decorate that with @rung.eager_break",
    ):
        rung.wrap(Calls(how), dynamic=ROWS, breaks="auto")(torch.ones(3, 4))


def test_the_wrapped_function_itself_says_so() -> None:
    with pytest.raises(TraceError, match="no automatic break: the line stands in the wrapped function itself"):
        rung.wrap(Inline(), dynamic=ROWS, breaks="auto")(torch.ones(3, 4))
