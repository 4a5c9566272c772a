"""Breaks that call the module, or use the graphs, that they are part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.errors import StateError
from rung.graphs import Descriptor, GraphManager, GraphMode
from tests.graphs.toys import ToyPlan, brk, data, make_manager, piece

IN_BREAK: list[Callable[[torch.Tensor], torch.Tensor]] = []  # what the break of `Nested` does


@rung.eager_break(out="x")
def inside(x: torch.Tensor) -> torch.Tensor:
    return IN_BREAK[-1](x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.linear(inside(y)) + y


def calls_itself(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Each row goes through the module twice more, and the last one again by itself."""
    depth = 0

    def again(x: torch.Tensor) -> torch.Tensor:
        nonlocal depth
        if depth == 2:
            return x * 2
        depth += 1
        try:
            return torch.cat([module(x[:-1]), module(x[-1:])]) if x.shape[0] > 1 else module(x)
        finally:
            depth -= 1

    return again


@pytest.mark.parametrize("options", [{}, {"pad": ("rows",), "pad_unproved": True}, {"outputs": "borrow"}], ids=str)
@pytest.mark.parametrize("graphs", ["none", "piecewise", "full"])
def test_a_break_may_call_its_own_module(graphs: str, options: dict[str, Any]) -> None:
    plain = Nested().eval().requires_grad_(False)
    module = rung.wrap(
        Nested().eval().requires_grad_(False), dynamic={"x": {0: "rows"}}, graphs=graphs, maximum=8, **(options if graphs != "none" else {})
    )
    module.load_state_dict(plain.state_dict())
    for rows in (3, 3, 5, 2, 3):
        x = torch.randn(rows, 4)
        IN_BREAK[:] = [calls_itself(plain)]
        wanted = plain(x)
        IN_BREAK[:] = [calls_itself(module)]
        torch.testing.assert_close(module(x), wanted)
    assert (module.rung.counters["step.none.nested"] > 0) is (graphs != "none")


def test_a_capture_ahead_has_nested_calls_too() -> None:
    plain = Nested().eval().requires_grad_(False)
    module = rung.wrap(Nested().eval().requires_grad_(False), dynamic={"x": {0: "rows"}}, graphs="piecewise", maximum=8)
    module.load_state_dict(plain.state_dict())
    x = torch.randn(4, 4)
    IN_BREAK[:] = [calls_itself(module)]
    module.rung.capture([2, 4], x)
    module.rung.suspend()
    module.rung.resume()
    got = module(x)
    IN_BREAK[:] = [calls_itself(plain)]
    torch.testing.assert_close(got, plain(x))


@pytest.mark.parametrize("call", ["release", "suspend", "resume", "recapture", "weights_changed", "capture"])
def test_a_break_that_changes_its_own_graphs_is_refused(call: str) -> None:
    module = rung.wrap(Nested().eval().requires_grad_(False), dynamic={"x": {0: "rows"}}, graphs="piecewise", maximum=8)
    x = torch.randn(3, 4)

    def change(y: torch.Tensor) -> torch.Tensor:
        getattr(module.rung, call)(*(([2], x) if call == "capture" else ()))
        return y * 2

    IN_BREAK[:] = [lambda y: y * 2]
    wanted = module(x)
    IN_BREAK[:] = [change]
    with pytest.raises(StateError, match="inside of their own step"):
        module(x)
    IN_BREAK[:] = [lambda y: y * 2]
    with module.rung.counters.expect(**{"step.piecewise.best": 1}):
        assert torch.equal(module(x), wanted)


@pytest.mark.parametrize("mode", [GraphMode.PIECEWISE, GraphMode.NONE])
def test_a_step_inside_of_a_step_is_refused(mode: GraphMode) -> None:
    managers: list[GraphManager] = []
    descriptor = Descriptor(mode=GraphMode.PIECEWISE, num_tokens=4)

    def again(q: torch.Tensor) -> Sequence[Any]:
        if managers:
            managers[0].run(Descriptor(mode=mode, num_tokens=4))
        return (q + 1,)

    plan = ToyPlan(
        [(piece("piece_00", lambda x: (x * 2,)), ("x",), ("q",)), (brk("break_01", again), ("q",), ("y",))],
        ("y",),
    )
    manager = make_manager(plan)
    manager.capture([descriptor])
    x = data(4, 1)
    manager.inputs[0].write(x, {"tokens": 4})
    managers.append(manager)
    with pytest.raises(StateError, match="inside of their own step"):
        manager.run(descriptor)
    managers.clear()
    assert not manager.is_running
    assert torch.equal(manager.run(descriptor).clone()[0], x * 2 + 1)
