from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rung.attention.layer import attention
from rung.compile.bound import Capture
from rung.compile.breaks import _implementation, attention_of, break_call, break_capture, parts
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


def attention_break() -> Step:
    """query 0, key 1, value 2, out 3: the write makes 4, which orders it before attention."""
    write = OpCall("rung::kv_cache_write", (value(1), value(2), {"constant": "layer"}), {}, (4,))
    attend = OpCall("rung::attention", (value(0), value(1), value(2), value(3), {"constant": "layer"}, value(4)), {}, ())
    return Step("attention_01", (0, 1, 2, 3), (), calls=(write, attend))


def test_the_cache_write_is_a_part_that_every_mode_captures() -> None:
    first, second = parts(attention_break())
    assert (first.name, first.inputs, first.outputs) == ("attention_01.0", (1, 2), (4,))
    assert (second.name, second.inputs, second.outputs) == ("attention_01.1", (0, 1, 2, 3, 4), ())
    assert (break_capture(first), break_capture(second)) == (Capture.ALWAYS, Capture.FULL)
    assert break_capture(attention_break()) is Capture.FULL


def test_rotation_is_captured_with_the_write_that_it_is_part_of() -> None:
    """query 0, key 1, value 2, rotated 3, cos 4, sin 5, out 6."""
    tensors = tuple(value(number) for number in range(6))
    write = OpCall("rung::rotate_and_write", (*tensors, {"constant": "layer"}), {}, (7,))
    attend = OpCall("rung::attention", (value(3), value(1), value(2), value(6), {"constant": "layer"}, value(7)), {}, ())
    first, second = parts(Step("attention_01", tuple(range(7)), (), calls=(write, attend)))
    assert (break_capture(first), break_capture(second)) == (Capture.ALWAYS, Capture.FULL)
    assert first.inputs == (0, 1, 2, 3, 4, 5)


def test_a_break_of_equal_ops_is_one_part() -> None:
    whole = step(OpCall("rungtest::double", (value(0),), {}, (1,)), inputs=(0,), outputs=(1,))
    assert parts(whole) == (whole,)


def test_an_op_that_is_tagged_unsafe_is_never_captured() -> None:
    assert break_capture(step(OpCall("rungtest::host_scale", (value(0),), {}, (1,)), inputs=(0,), outputs=(1,))) is Capture.NEVER


def test_parts_do_together_what_the_break_does() -> None:
    calls = (
        OpCall("operator::mul", (value(1), {"constant": 1}), {}, (2,)),
        OpCall("rungtest::first_rows", (value(0), value(2)), {}, (3,)),
        OpCall("rungtest::host_scale", (value(3),), {}, (4,)),
        OpCall("rungtest::pair", (value(4),), {}, (5, -1), is_tuple=True),
    )
    whole = step(*calls, inputs=(0, 1), outputs=(5, 3))
    given: dict[int, Any] = {0: torch.arange(6.0).view(3, 2), 1: 2}
    wanted = break_call(whole)([given[0], given[1]])
    cut = parts(whole)
    assert [break_capture(part) for part in cut] == [Capture.ALWAYS, Capture.FULL, Capture.NEVER, Capture.FULL]
    for part in cut:
        given.update(zip(part.outputs, break_call(part)([given[number] for number in part.inputs]), strict=True))
    assert all(torch.equal(given[number], tensor) for number, tensor in zip(whole.outputs, wanted, strict=True))


def test_a_call_of_attention_is_bound_from_the_inputs_of_its_break() -> None:
    named = {"written": value(9), "fresh": {"constant": True}}
    call = OpCall("rung::attention.default", (value(4), value(2), value(3), value(7), {"constant": "layers.0"}), named, ())
    bind = attention_of(step(call, inputs=(2, 3, 4, 7, 9), outputs=()))
    assert bind is not None
    key, val, query, out, written = (torch.empty(1) for _ in range(5))
    bound = bind([key, val, query, out, written])
    assert (bound.layer, bound.fresh, bound.out_scale) == ("layers.0", True, None)
    assert all(a is b for a, b in ((bound.query, query), (bound.key, key), (bound.value, val), (bound.out, out), (bound.written, written)))


def test_other_breaks_are_no_call_of_attention() -> None:
    call = OpCall("rung::attention", (value(0), value(0), value(0), value(0), {"constant": "a"}), {}, ())
    other = OpCall("rungtest::double", (value(0),), {}, (1,))
    assert attention_of(step(call, inputs=(0,), outputs=())) is not None
    assert attention_of(step(other, inputs=(0,), outputs=(1,))) is None
    assert attention_of(step(call, call, inputs=(0,), outputs=())) is None
    assert attention_of(step(call, inputs=(), outputs=())) is None


def test_a_call_of_attention_stays_alone() -> None:
    call = OpCall("rung::attention", (value(0), value(0), value(0), value(0), {"constant": "a"}), {}, ())
    other = OpCall("rungtest::write", (value(0), value(0)), {}, ())
    cut = parts(step(other, call, replace(call), other, inputs=(0,), outputs=()))
    assert [[one.target for one in part.calls] for part in cut] == [
        ["rungtest::write"], ["rung::attention"], ["rung::attention"], ["rungtest::write"],
    ]  # fmt: skip
    assert [attention_of(part) is not None for part in cut] == [False, True, True, False]
