"""Rules of ops that multiply and add over labelled dimensions: matmuls, convolutions, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rung.compile.rows.call import Call
from rung.compile.rows.elementwise import broadcast
from rung.compile.rows.state import Axis, State, mixes, unknown

Rule = Callable[[Call], State]


def contract(call: Call, operands: dict[str, str], result: str) -> Axis | None:
    """`operands`: argument -> a letter for each of its dimensions; letters that `result` lacks are summed over."""
    found: tuple[str, Axis] | None = None
    for name, letters in operands.items():
        axis = call.axis(name)
        if axis is None:
            continue
        letter = letters[axis.dim]
        if letter not in result:
            raise mixes(f"it sums over dimension {axis.dim} of {name}, which counts rows")
        if found is not None and (letter, axis.at(0)) != (found[0], found[1].at(0)):
            raise mixes("every row meets every other row")
        found = letter, axis
    return None if found is None else found[1].at(result.index(found[0]))


def product(operands: dict[str, str], result: str, added: str | None = None) -> Rule:
    """A contraction, with a further argument that is added to its result."""

    def rule(call: Call) -> State:
        axis = contract(call, operands, result)
        tensor = call[added] if added is not None else None
        extra = broadcast(call, [tensor], len(result)) if isinstance(tensor, torch.Tensor) else None
        if extra is not None and extra != axis:
            raise mixes("it adds rows to every row") if axis is not None else unknown("only its bias holds rows")
        return axis

    return rule


def linear(call: Call) -> State:
    """`aten::linear` and its quantised kin: input [..., in], weight [out, in]."""
    axis = call.only("input")
    if axis.dim == call["input"].dim() - 1:
        raise mixes("it sums over the last dimension, which counts rows")
    return axis.at(axis.dim)


def convolution(call: Call) -> State:
    axis = call.only("input")
    if axis.dim != 0:
        raise mixes(f"it convolves over dimension {axis.dim}, which counts rows")
    return axis.at(0)


def attention(call: Call) -> list[State]:
    """Query [batch, heads, L, E], key [batch, heads, S, E], value [batch, heads, S, V]: keys and values are summed over S."""
    axis = contract(call, {"query": "bhle", "key": "bhse", "value": "bhsv"}, "bhlv")
    name = next((name for name in ("attn_mask", "attn_bias") if isinstance(call.arguments.get(name), torch.Tensor)), None)
    mask = broadcast(call, [call[name]], 4) if name is not None else None
    if mask is not None and mask != axis:
        raise mixes("its mask holds rows along another dimension")
    if axis is not None and axis.dim == 2 and call.arguments.get("is_causal"):
        raise unknown("a causal mask over rows")
    outputs = call.outputs()
    return [axis, *(axis if axis is not None and call.mentions(output) else None for output in outputs[1:])]


def fused_attention_block(call: Call) -> State:
    """`_native_multi_head_attention` and the encoder layer: the batch comes first, all else mixes."""
    axis = call.only("query", "key", "value", "src", "mask")
    if axis.dim != 0 or any(axis != call.axis(name) for name in ("query", "key", "value") if name in call):
        raise mixes("attention among rows")
    return axis


RULES: dict[str, Rule] = {
    "mm": product({"self": "ik", "mat2": "kj"}, "ij"),
    "_int_mm": product({"self": "ik", "mat2": "kj"}, "ij"),
    "addmm": product({"mat1": "ik", "mat2": "kj"}, "ij", "self"),
    "bmm": product({"self": "bik", "mat2": "bkj"}, "bij"),
    "baddbmm": product({"batch1": "bik", "batch2": "bkj"}, "bij", "self"),
    "mv": product({"self": "ik", "vec": "k"}, "i"),
    "addmv": product({"mat": "ik", "vec": "k"}, "i", "self"),
    "dot": product({"self": "i", "tensor": "i"}, ""),
    "vdot": product({"self": "i", "other": "i"}, ""),
}
