from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rung.compile.bound import BoundStep
from tests.compile.cases import Block, Stack, assert_same, double, uncompiled


def chain(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    y = torch.sin(x)
    z = double(y) + 1
    w = double(z) * 2
    return w, x.shape[0] + 3


def run_step(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
    return step.call(arguments)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_walking_the_steps_equals_the_call(rows: int) -> None:
    compiled, _ = uncompiled(chain, torch.zeros(3, 4))
    x = torch.randn(rows, 4)
    assert_same(compiled.restore(compiled.run_steps([x], run_step), [x]), compiled(x))


def test_runner_sees_every_step_once_in_order() -> None:
    compiled, _ = uncompiled(chain, torch.zeros(3, 4))
    seen: list[str] = []

    def runner(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        seen.append(step.name)
        return step.call(arguments)

    compiled.run_steps([torch.zeros(2, 4)], runner)
    assert seen == [step.name for step in compiled.steps] == ["piece_00", "double_00", "piece_01", "double_01", "piece_02", "sizes"]


def test_walk_drops_a_value_after_its_last_use() -> None:
    compiled, _ = uncompiled(chain, torch.zeros(3, 4))
    made: list[weakref.ref[torch.Tensor]] = []
    living: list[int] = []

    def runner(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        living.append(sum(reference() is not None for reference in made))
        results = step.call(arguments)
        made.extend(weakref.ref(value) for value in results if isinstance(value, torch.Tensor))
        return results

    compiled.run_steps([torch.zeros(2, 4)], runner)
    assert max(living) == 1


def test_stitched_code_drops_a_value_after_its_last_use() -> None:
    compiled, _ = uncompiled(chain, torch.zeros(3, 4))
    made: list[weakref.ref[torch.Tensor]] = []
    living: list[int] = []
    pieces = list(compiled._pieces)

    def watch(call: Any) -> Any:
        def run(inputs: list[Any]) -> Sequence[Any]:
            living.append(sum(reference() is not None for reference in made))
            results: Sequence[Any] = call(inputs)
            made.extend(weakref.ref(value) for value in results)
            return results

        return run

    compiled._pieces = tuple(watch(call) for call in pieces)
    compiled.rebind({})
    compiled(torch.zeros(2, 4))
    assert len(living) == 3
    assert max(living) == 0  # what a piece made is read by the break alone


def test_weights_are_bound_and_rebound() -> None:
    module = Block()
    compiled, _ = uncompiled(module.forward, torch.zeros(3, 8))
    assert compiled.input_names == ("x",)
    x = torch.randn(2, 8)
    module.linear.weight = torch.nn.Parameter(torch.zeros(8, 8))
    compiled.rebind({"self": module})
    assert_same(compiled(x), module(x))


def test_concurrent_calls_do_not_mix() -> None:
    module = Stack([Block() for _ in range(3)])
    compiled, _ = uncompiled(module.forward, torch.zeros(3, 8))
    inputs = [torch.randn(rows, 8) for rows in (1, 2, 3, 4)]
    expected = [module(x) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.no_grad():
            wrong.extend(index for _ in range(50) if not torch.allclose(compiled(inputs[index]), expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_source_names_every_call() -> None:
    compiled, _ = uncompiled(chain, torch.zeros(3, 4))
    text = compiled.source.text()
    assert text.count("call_") >= len(compiled.steps)
    assert "del " in text
