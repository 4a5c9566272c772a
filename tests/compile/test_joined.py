from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rung.attention import Rotation
from rung.compile.bound import Capture
from rung.compile.breaks import break_call, break_capture, parts
from rung.compile.joined import joined_pairs
from rung.compile.plan import OpCall, Step
from rung.context import ForwardContext, set_forward_context

ALL = frozenset(range(20))


def value(number: int) -> dict[str, Any]:
    return {"value": number}


def rotated_attention(outputs: tuple[int, ...] = (), before: tuple[OpCall, ...] = (), after: tuple[OpCall, ...] = ()) -> Step:
    """query 0, key 1, value 2, rotated 3, cos 4, sin 5, out 6; the rotation makes 7."""
    rotate = OpCall("rung::rotate_and_write.default", (*(value(n) for n in range(6)), {"constant": "layer"}), {}, (7,))
    attend = OpCall("rung::attention", (value(3), value(1), value(2), value(6), {"constant": "layer"}, value(7)), {}, ())
    return Step("attention_01", tuple(range(7)), outputs, calls=(*before, rotate, attend, *after))


def test_a_rotation_in_front_of_its_attention() -> None:
    step = rotated_attention()
    assert joined_pairs(step, ALL) == {0}
    (part,) = parts(step, {0})
    assert (part, break_capture(part)) == (step, Capture.FULL)
    assert len(parts(step)) == 2


@pytest.mark.parametrize("outputs", [(3,), (7,)])
def test_not_where_something_else_reads_what_was_rotated(outputs: tuple[int, ...]) -> None:
    assert joined_pairs(rotated_attention(outputs=outputs), ALL) == set()
    assert joined_pairs(rotated_attention(), ALL - {3}) == set()
    reader = OpCall("rungtest::double", (value(outputs[0]),), {}, (8,))
    assert joined_pairs(rotated_attention(after=(reader,)), ALL) == set()
    assert joined_pairs(rotated_attention(after=(replace(reader, args=(value(2),)),)), ALL) == {0}


@pytest.mark.parametrize(
    "change",
    [
        {"args": (value(0), value(1), value(2), value(6), {"constant": "layer"}, value(7))},  # queries as they were
        {"args": (value(3), value(1), value(2), value(6), {"constant": "another"}, value(7))},
        {"args": (value(3), value(1), value(2), value(6), {"constant": "layer"})},  # nothing orders it
        {"args": (value(3), value(3), value(2), value(6), {"constant": "layer"}, value(7))},
        {"autocast": (("cuda", None, False, True),)},
        {"target": "rungtest::attention"},
    ],
)
def test_not_another_attention(change: dict[str, Any]) -> None:
    step = rotated_attention()
    assert joined_pairs(replace(step, calls=(step.calls[0], replace(step.calls[1], **change))), ALL) == set()


class Backend:
    """Notes what it is asked for."""

    def __init__(self, joins: bool) -> None:
        self.joins = joins
        self.asked: list[str] = []

    def rotate_and_attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, cache: object, out: torch.Tensor, *rest: Any
    ) -> bool:
        self.asked.append("both")
        assert (query.item(), key.item(), value.item(), rotation.cos.item(), rotation.sin.item(), out.item()) == (0, 1, 2, 4, 5, 6)
        return self.joins

    def rotate_and_write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, *rest: Any) -> None:
        self.asked.append(f"rotate into {rest[0].item():g}")

    def forward(self, query: torch.Tensor, cache: object, out: torch.Tensor, metadata: object) -> None:
        self.asked.append(f"attend {query.item():g} into {out.item():g}")


@pytest.mark.parametrize(("joins", "asked"), [(True, ["both"]), (False, ["both", "rotate into 3", "attend 3 into 6"])])
def test_a_backend_does_both_or_one_after_the_other(joins: bool, asked: list[str]) -> None:
    backend = Backend(joins)
    layer = SimpleNamespace(backend=backend, kv_cache=object())
    metadata = SimpleNamespace(slot_mapping=torch.zeros(1))
    context = ForwardContext(attention_layers={"layer": layer}, attention_metadata={"layer": metadata})
    with set_forward_context(context):
        assert break_call(rotated_attention(), private=ALL)([torch.tensor(float(n)) for n in range(7)]) == ()
    assert backend.asked == asked


def test_arguments_by_name_arrive() -> None:
    step = rotated_attention()
    rotate, attend = step.calls
    rotate = replace(rotate, kwargs={"query_weight": value(1), "key_weight": value(2), "epsilon": {"constant": 0.5}})
    attend = replace(attend, args=attend.args[:5], kwargs={"written": value(7), "out_scale": value(5), "fresh": {"constant": False}})
    step = replace(step, calls=(rotate, attend))
    given: list[Any] = []
    backend = SimpleNamespace(rotate_and_attend=lambda *arguments: given.extend(arguments) or True)
    layer = SimpleNamespace(backend=backend, kv_cache="cache")
    context = ForwardContext(attention_layers={"layer": layer}, attention_metadata={"layer": "metadata"})
    with set_forward_context(context):
        break_call(step, private=ALL)([torch.tensor(float(n)) for n in range(7)])
    rotation = given[3]
    assert (rotation.query_weight.item(), rotation.key_weight.item(), rotation.epsilon, given[7].item()) == (1, 2, 0.5, 5)
