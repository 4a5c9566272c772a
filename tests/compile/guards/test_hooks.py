"""Hooks that a trace has inside: another one, or one that reads something else, is another trace; an equal one is none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

import rung
from rung.compile.guards import GuardSet, GuardState, Roots
from rung.compile.trace import trace
from rung.counters import Count
from rung.errors import UnsupportedModuleError

Hook = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * 1.5


def plus(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def times(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3


def shifted(module: nn.Module, args: Any, output: torch.Tensor, by: float = 0.0) -> torch.Tensor:
    return output + by


def any_way(*args: Any) -> torch.Tensor:
    return args[-1] * len(args)  # type: ignore[no-any-return]


class Shift:
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return output + self.by

    def less(self, module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return output - self.by


class ShiftModule(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def less(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output - self.by


def closure(by: Any) -> Hook:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return output + by

    return hook


LAMBDAS = [lambda module, args, output: output + 1, lambda module, args, output: output + 2]
OTHERS: dict[str, tuple[Hook, Hook]] = {
    "function": (plus, times),
    "lambdas of one line": (LAMBDAS[0], LAMBDAS[1]),
    "closure": (closure(1.0), closure(2.0)),
    "partial": (functools.partial(shifted, by=1.0), functools.partial(shifted, by=2.0)),
    "method": (Shift(1.0).less, Shift(2.0).less),
    "method of a module": (ShiftModule(1.0).less, ShiftModule(2.0).less),
    "object": (Shift(1.0), Shift(2.0)),
    "tensor of another type": (closure(torch.ones(4)), closure(torch.ones(4).double())),
}
EQUALS: dict[str, tuple[Hook, Hook]] = {
    "the same": (plus, plus),
    "closure": (closure(1.0), closure(1.0)),
    "partial": (functools.partial(shifted, by=1.0), functools.partial(shifted, by=1.0)),
    "method": (Shift(1.0).less, Shift(1.0).less),
    "object": (Shift(1.0), Shift(1.0)),
    "tensor": (closure(torch.ones(4)), closure(torch.ones(4) * 2)),
}


def hooked(hook: Hook, **options: Any) -> tuple[Any, Any]:
    net: Any = Net().eval().requires_grad_(False)
    return net, net.up.register_forward_hook(hook, **options)


def state_of(net: Any, **options: Any) -> GuardState:
    guards = trace(net.forward, {"x": torch.ones(3, 4)}, {"x": {0: "rows"}}).guards
    assert guards.unknown == ()
    assert GuardSet.from_json(guards.to_json()) == guards
    return GuardState(guards, Roots(net.forward), **options)


def holds(state: GuardState) -> bool:
    return state.unchanged() and state.all_swept()


@pytest.mark.parametrize("name", OTHERS)
def test_another_hook_is_another_trace(name: str) -> None:
    first, second = OTHERS[name]
    net, handle = hooked(first)
    state = state_of(net)
    assert all(holds(state) for _ in range(3))
    handle.remove()
    assert not holds(state)
    assert "_forward_hooks.0" in state.violation()
    net.up.register_forward_hook(second)
    assert not holds(state)
    assert "_forward_hooks.0" in state.violation()


@pytest.mark.parametrize("name", EQUALS)
def test_a_hook_that_traces_alike_is_bound_anew(name: str) -> None:
    first, second = EQUALS[name]
    net, handle = hooked(first)
    state = state_of(net)
    handle.remove()
    net.up.register_forward_hook(second)
    assert not holds(state)
    assert state.violation() == ""
    state.refresh()
    assert holds(state)


def test_what_a_hook_reads_is_guarded() -> None:
    hook = Shift(1.0)
    net, _ = hooked(hook)
    state = state_of(net)
    hook.by = 2.0
    assert not holds(state)
    assert "_forward_hooks.0.by' was 1.0 and is 2.0" in state.violation()


def test_order_and_way_of_calling_are_guarded() -> None:
    net, handle = hooked(any_way)
    state = state_of(net)
    handle.remove()
    net.up.register_forward_hook(any_way, with_kwargs=True)
    assert "called in another way" in state.violation()
    net.up._forward_hooks.clear()
    net.up.register_forward_hook(plus)
    net.up.register_forward_hook(times)
    state = state_of(net)
    net.up._forward_hooks.move_to_end(next(iter(net.up._forward_hooks)))
    assert not holds(state)
    assert "_forward_hooks.0" in state.violation()


def test_one_more_and_pre_hooks() -> None:
    net, _ = hooked(plus)
    state = state_of(net)
    net.up.register_forward_hook(plus)
    assert "had 1 entries and has 2" in state.violation()
    pre = net.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    state = state_of(net)
    pre.remove()
    net.up.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    assert "_forward_pre_hooks.0" in state.violation()


def test_dropped_hooks_are_not_looked_at() -> None:
    net, handle = hooked(Shift(1.0))
    state = state_of(net, dropped=("hooks",))
    handle.remove()
    assert holds(state)
    assert state.violation() == ""


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_calls_equal_those_of_the_hooked_module(graphs: str) -> None:
    eager, x = Net().eval().requires_grad_(False), torch.randn(3, 4)
    module = rung.wrap(eager.__class__().eval().requires_grad_(False), dynamic={"x": {0: "rows"}}, graphs=graphs)
    module.load_state_dict(eager.state_dict())
    for hook in (plus, times, plus, closure(torch.ones(4)), closure(torch.ones(4) * 2), plus):
        handles = [net.up.register_forward_hook(hook) for net in (module, eager)]
        for _ in range(2):
            torch.testing.assert_close(module(x), eager(x))
        for handle in handles:
            handle.remove()
    assert module.rung.counters[Count.DYNAMO_TRACES] == 3


def test_hooks_of_all_modules_run_eagerly_and_are_counted() -> None:
    module, x = rung.wrap(Net().eval().requires_grad_(False), dynamic={"x": {0: "rows"}}), torch.randn(3, 4)
    plain = module(x)
    register = {"hook": all_modules.register_module_forward_hook, "pre-hook": all_modules.register_module_forward_pre_hook}
    seen: list[nn.Module] = []
    for count, add in enumerate(register.values(), 1):
        handle = add(lambda found, *_: seen.append(found))
        try:
            assert torch.equal(module(x), plain)
            fresh = rung.wrap(Net().eval().requires_grad_(False), dynamic={"x": {0: "rows"}}, graphs="full")
            with pytest.raises(UnsupportedModuleError, match="hooks of all modules are registered"):
                fresh.rung.capture([1], x)
        finally:
            handle.remove()
        assert set(seen) == {module.up, module}
        seen.clear()
        module(x)
        assert seen == []
        assert module.rung.counters["eager.global_hooks"] == count
    assert module.rung.counters[Count.DYNAMO_TRACES] == 1
