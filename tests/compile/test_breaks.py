from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rung.attention.layer import attention
from rung.compile.breaks import _implementation, break_call
from rung.compile.plan import OpCall, Step
from tests.compile import cases


def value(number: int) -> dict[str, Any]:
    return {"value": number}


def step(*calls: OpCall, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Step:
    return Step("break", inputs, outputs, calls=calls)


def test_calls_run_in_order_and_pass_values_on() -> None:
    calls = [OpCall("rungtest::double", (value(0),), {}, (1,)), OpCall("rungtest::double", (value(1),), {}, (2,))]
    result = break_call(step(*calls, inputs=(0,), outputs=(2, 1)))([torch.ones(2)])
    assert [item.tolist() for item in result] == [[4, 4], [2, 2]]


def test_tuple_result_and_a_part_that_nobody_reads() -> None:
    call = OpCall("rungtest::pair", (value(0),), {}, (-1, 3), is_tuple=True)
    (result,) = break_call(step(call, inputs=(0,), outputs=(3,)))([torch.ones(2)])
    assert result.tolist() == [0, 0]


def test_out_argument_and_keyword() -> None:
    call = OpCall("rungtest::write", (value(0), value(1)), {"scale": {"constant": 2.5}}, ())
    out = torch.zeros(2)
    assert break_call(step(call, inputs=(0, 1), outputs=()))([torch.ones(2), out]) == ()
    assert out.tolist() == [2.5, 2.5]


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_number_without_a_literal(scale: float) -> None:
    call = OpCall("rungtest::write", (value(0), value(1)), {"scale": {"constant": scale}}, ())
    out = torch.zeros(2)
    break_call(step(call, inputs=(0, 1), outputs=()))([torch.ones(2), out])
    assert torch.equal(out, torch.full((2,), scale)) or out.isnan().all()


def test_size_arithmetic() -> None:
    calls = [OpCall("operator::mul", (value(0), {"constant": 2}), {}, (1,)), OpCall("operator::add", (value(1), {"constant": 1}), {}, (2,))]
    assert break_call(step(*calls, inputs=(0,), outputs=(2,)))([5]) == (11,)


def test_attention_is_entered_directly() -> None:
    assert _implementation("rung::attention") is attention
    assert _implementation("rungtest::double") is torch.ops.rungtest.double.default
    assert cases.TOY_OPS
