from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rung
from rung.compile.effects import refuse_side_effects
from rung.compile.trace import trace
from rung.errors import TraceError, UnsupportedModuleError
from tests.compile import cases
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


class Counts(torch.nn.Module):
    """What people write to keep a count, a mean and the last result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.seen = kind, 0, True
        self.last = torch.zeros(1)
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "add":
            self.n += 1
        elif self.kind == "submodule":
            self.inner.mean *= 0.5
            self.inner.mean += x.mean(0)
        elif self.kind == "result of a method":
            self.n = self.n.add_(1)
        elif self.kind == "returned":
            self.n += 1
            return self.n
        elif self.kind == "new tensor":
            self.n = self.n + 1
        elif self.kind == "inverted":
            self.n = ~self.n
        elif self.kind == "new in submodule":
            self.inner.mean = x.mean(0)
        elif self.kind == "number":
            self.calls += 1
        elif self.kind == "flag":
            self.seen = not self.seen
        elif self.kind == "attribute":
            self.last = x * 2
        elif self.kind == "word":
            self.kind = "words"
        return x * 2 + self.n + self.inner.mean


@pytest.mark.parametrize("kind", ["add", "submodule", "result of a method", "returned"])
@pytest.mark.parametrize("graphs", ["none", "piecewise", "full"])
def test_a_tensor_that_is_updated_and_assigned_to_itself_is_updated_at_every_call(kind: str, graphs: str) -> None:
    eager, module = Counts(kind), Counts(kind)
    buffers = dict(module.named_buffers())
    rung.wrap(module, dynamic={"x": {0: "rows"}}, graphs=graphs)
    for rows in (3, 2, 3):
        x = torch.randn(rows, 4)
        result = module(x)
        torch.testing.assert_close(result, eager(x))
    assert kind != "returned" or result is module.n
    for name, value in eager.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), value)
        assert module.get_buffer(name) is buffers[name]
    assert not eager.n.equal(torch.zeros(())) or kind == "submodule"


HINTS = {
    "new tensor": "'n' while it runs.*hint: write into the tensor: `self.n.copy_\\(value\\)` in place of `self.n = value`",
    "inverted": "'n' while it runs.*hint: write into the tensor: `self.n.copy_",
    "new in submodule": "'inner.mean' while it runs.*hint: write into the tensor: `self.mean.copy_",
    "number": r"'calls' while it runs.*hint: .*`self.register_buffer\('calls', .*torch.int64.*`self.calls.add_",
    "flag": "'seen' while it runs.*hint: .*dtype=torch.bool.*`self.seen.fill_",
    "attribute": "'last' while it runs.*hint: return the tensor, or make a buffer for it in __init__ .*`self.last.copy_",
    "word": "'kind' while it runs.*hint: set 'kind' in __init__ or where the module is called",
}


@pytest.mark.parametrize("kind", HINTS)
def test_the_hint_says_what_to_write_instead(kind: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=f"(?s){HINTS[kind]}"):
        rung.wrap(Counts(kind), dynamic={"x": {0: "rows"}})(torch.ones(3, 4))


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


CALLS, BIG = 0, 100_000
RUNNING: bool | None = None
TABLE: dict[str, int] = {"calls": 0}
QUEUE: collections.deque[int] = collections.deque()
DEFAULTS: collections.defaultdict[str, int] = collections.defaultdict(int)
ORDERED = collections.OrderedDict(calls=0)


class OfClass:
    calls = 0


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


SLOTS = Slots()


def counter() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x + calls

    return count


COUNT = counter()


def adds_to_a_global(x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return x + CALLS


def replaces_a_global(x: torch.Tensor) -> torch.Tensor:
    global AMBIENT
    AMBIENT = Ambient()
    return x + 1


def adds_to_a_module(x: torch.Tensor) -> torch.Tensor:
    cases.CALLS = cases.CALLS + 1  # type: ignore[attr-defined]
    return x + cases.CALLS  # type: ignore[attr-defined,no-any-return]


def adds_to_a_class(x: torch.Tensor) -> torch.Tensor:
    OfClass.calls += 1
    return x + OfClass.calls


def adds_to_slots(x: torch.Tensor) -> torch.Tensor:
    SLOTS.calls += 1
    return x + SLOTS.calls


def adds_to_a_dict(x: torch.Tensor) -> torch.Tensor:
    TABLE["calls"] += 1
    return x + TABLE["calls"]


def appends_to_a_deque(x: torch.Tensor) -> torch.Tensor:
    QUEUE.append(1)
    return x + len(QUEUE)


def adds_to_a_defaultdict(x: torch.Tensor) -> torch.Tensor:
    DEFAULTS["calls"] += 1
    return x + DEFAULTS["calls"]


def adds_to_an_ordered_dict(x: torch.Tensor) -> torch.Tensor:
    ORDERED["calls"] += 1
    return x + ORDERED["calls"]


def adds_to_a_cell(x: torch.Tensor) -> torch.Tensor:
    return COUNT(x)


ELSEWHERE: dict[Callable[..., Any], str] = {
    adds_to_a_global: r"global 'CALLS' at .*test_effects.py:\d+ \(CALLS \+= 1\)",
    replaces_a_global: r"global 'AMBIENT' at .*test_effects.py:\d+ \(AMBIENT = Ambient\(\)\)",
    adds_to_a_module: r"the attribute 'CALLS' of module 'tests.compile.cases' at .*test_effects.py:\d+ ",
    adds_to_a_class: r"(the attribute 'calls' of class 'OfClass')?.* at .*test_effects.py:\d+ \(OfClass.calls \+= 1\)",
    adds_to_slots: "global 'SLOTS'",
    adds_to_a_dict: "global 'TABLE'",
    appends_to_a_deque: "global 'QUEUE'",
    adds_to_a_defaultdict: "global 'DEFAULTS'",
    adds_to_an_ordered_dict: "global 'ORDERED'",
    adds_to_a_cell: r"a variable of an enclosing function at .*test_effects.py:\d+ \(calls \+= 1\)",
}


def elsewhere() -> list[Any]:
    cell = COUNT.__closure__[0].cell_contents  # type: ignore[attr-defined]
    number: Any = cases.CALLS  # type: ignore[attr-defined]
    containers = [dict(TABLE), list(QUEUE), dict(DEFAULTS), dict(ORDERED)]
    return [CALLS, AMBIENT, number, OfClass.calls, SLOTS.calls, cell, *containers]


@pytest.mark.parametrize("function", ELSEWHERE, ids=lambda function: function.__name__)
def test_state_outside_of_the_module_is_refused_and_left_alone(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CALLS", 0, raising=False)
    before = elsewhere()
    with pytest.raises((UnsupportedModuleError, TraceError), match=f"(?s){ELSEWHERE[function]}.*hint: "):  # 2.11 traces no class
        trace(function, {"x": torch.ones(2)}, {})
    assert elsewhere() == before


class CountsOnItsClass(torch.nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return x + self.calls


class Heir(CountsOnItsClass):
    pass


@pytest.mark.parametrize("kind", [CountsOnItsClass, Heir])
def test_the_class_of_the_module_is_left_alone(kind: type[torch.nn.Module]) -> None:
    module = rung.wrap(kind(), dynamic={"x": {0: "rows"}})
    for _ in range(2):
        with pytest.raises((UnsupportedModuleError, TraceError), match=r"at .*test_effects.py:\d+ \(type\(self\).calls \+= 1\)"):
            module(torch.ones(3, 4))
    assert CountsOnItsClass.calls == 0
    assert "calls" not in vars(Heir)


def resets_globals(x: torch.Tensor) -> torch.Tensor:
    global BIG, RUNNING
    before, BIG, RUNNING = BIG, 5, True
    y = x + BIG
    BIG, RUNNING = before, None
    return y


def test_a_global_that_is_set_and_reset_is_no_side_effect() -> None:
    assert trace(resets_globals, {"x": torch.ones(2)}, {}).inputs
