from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.attention import Attention, AttentionMetadata, AttentionSpec, KVCache, Rotation
from rung.attention.backends.torch_reference import TorchReference
from rung.compile.bound import BoundStep, Capture
from rung.compile.breaks import attention_of, break_call, break_capture, parts
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


def test_what_is_joined_is_bound_as_its_attention() -> None:
    """What orders it behind the rotation is made inside, so there is nothing to be given."""
    (part,) = parts(rotated_attention(), {0})
    bind = attention_of(part)
    assert bind is not None
    given = [torch.tensor(float(number)) for number in range(7)]
    call = bind(given)
    assert [one.item() for one in (call.query, call.key, call.value, call.out)] == [3, 1, 2, 6]
    assert (call.layer, call.written) == ("layer", None)
    assert attention_of(rotated_attention(outputs=(3,))) is None


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


class Newer(Backend):
    """Overrides one of the two, so that what it inherits says nothing of it."""

    def forward(self, query: torch.Tensor, cache: object, out: torch.Tensor, metadata: object) -> None:
        self.asked.append("attend anew")


class Sure(Newer):
    def rotate_and_attend(self, *arguments: Any) -> bool:
        return super().rotate_and_attend(*arguments)


@pytest.mark.parametrize(("backend", "asked"), [(Newer(True), ["rotate into 3", "attend anew"]), (Sure(True), ["both"])])
def test_a_backend_that_overrides_attention_is_not_joined_by_what_it_inherits(backend: Backend, asked: list[str]) -> None:
    layer = SimpleNamespace(backend=backend, kv_cache=object())
    context = ForwardContext(attention_layers={"layer": layer}, attention_metadata={"layer": SimpleNamespace(slot_mapping=torch.zeros(1))})
    with set_forward_context(context):
        break_call(rotated_attention(), private=ALL)([torch.tensor(float(n)) for n in range(7)])
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


class Beside(nn.Module):
    """Two layers whose calls are one break: nothing is computed between them. The second one does not rotate, or what it rotates is read
    again, by its name or through a view that was there before."""

    def __init__(self, second: str) -> None:
        super().__init__()
        spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=16, scale=0.25)
        self.a, self.b, self.second = Attention("a", spec), Attention("b", spec), second

    def forward(self, qkv: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv.cos().split([2, 1, 1], 1)
        cos, sin = angles.cos(), angles.sin()
        rotated, rotated_b, out, out_b = (query.new_empty(query.shape) for _ in range(4))
        view = rotated_b.flatten(1)
        written = torch.ops.rung.rotate_and_write(query, key, value, rotated, cos, sin, "a")
        torch.ops.rung.attention(rotated, key, value, out, "a", written)
        if self.second == "write":
            written = torch.ops.rung.kv_cache_write(key, value, "b")
            torch.ops.rung.attention(query, key, value, out_b, "b", written)
            return out + out_b
        written = torch.ops.rung.rotate_and_write(query, key, value, rotated_b, cos, sin, "b")
        torch.ops.rung.attention(rotated_b, key, value, out_b, "b", written)
        return out + out_b + (rotated_b if self.second == "rotate" else view.view(out.shape))


@pytest.mark.parametrize("second", ["write", "rotate", "view"])
def test_layers_side_by_side_of_which_one_is_joined(second: str) -> None:
    """Parts of both walks are told apart, though the second part of the one is the third of the other."""
    module, rows = Beside(second), 3
    for layer in (module.a, module.b):
        layer.bind(TorchReference(layer.spec), KVCache(torch.zeros(6, 16, 1, 16), torch.zeros(6, 16, 1, 16)))
    ints = torch.arange(rows + 1, dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start_loc=ints, seq_lens=torch.ones(rows, dtype=torch.int32), block_table=1 + ints[:rows, None],
        slot_mapping=16 * (1 + ints[:rows].long()), num_requests=rows, num_actual_tokens=rows, max_query_len=1, max_seq_len=1,
    )  # fmt: skip
    context = ForwardContext(attention_layers={"a": module.a, "b": module.b}, attention_metadata={"a": metadata, "b": metadata})
    inputs = torch.randn(rows, 4, 16), torch.randn(rows, 1, 8)
    with torch.no_grad(), set_forward_context(context):
        wanted = module(*inputs)
        torch.testing.assert_close(rung.wrap(module)(*inputs), wanted)
        variant, given = module.forward.prepare_call(*inputs)
        for joined in (False, True):
            ran: list[int] = []

            def run(step: BoundStep, arguments: list[Any], ran: list[int] = ran) -> Sequence[Any]:
                ran.append(step.kind == "break")
                return step.call(arguments)

            (found,) = variant.compiled.run_steps(given, run, joined=joined)
            torch.testing.assert_close(found, wanted)
            assert sum(ran) == 4 - joined
