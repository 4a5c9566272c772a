"""Operations that give their argument back: views to the same shape, conversions to the same dtype, clones, additions of nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from rung.passes.cleanup.aliases import Aliases, may_alias, schema_of
from rung.passes.identity import code_identity, digest
from rung.passes.pattern import same_size
from rung.passes.pattern_graph import filled

aten = torch.ops.aten


class NoopElimination:
    """Reads go to the argument instead. A view that changes nothing is always dropped; an operation that copies only when no write can
    tell the copy from its source. Nothing is dropped that would make two outputs, or an output and an input, one."""

    name = "noop"

    def uuid(self) -> str:
        return digest(code_identity(NoopElimination.run, Aliases._classes_of))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        counts: dict[str, int] = {}
        known = Aliases(graph)
        for node in list(graph.nodes):
            source = _source(node)
            if source is None or not may_go(known, node, source):
                continue
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            known = Aliases(graph)
            name = str(node.target).split(".")[1]
            counts[name] = counts.get(name, 0) + 1
        return counts


def _source(node: fx.Node) -> fx.Node | None:
    """The argument that a node gives back in the same layout, or None."""
    schema = schema_of(node)
    value = node.meta.get("val")
    if schema is None or schema.is_mutable or not isinstance(value, torch.Tensor):
        return None
    source = _single(node) if node.target is aten.cat.default else filled(node)[0] if schema.arguments else None
    if not isinstance(source, fx.Node) or not _alike(value, source.meta.get("val")):
        return None
    return source if may_alias(node) == [source] or _copies(node) else None


def _copies(node: fx.Node) -> bool:
    """Whether a node computes its first argument again, bit by bit. Adding 0.0 is not: it turns -0.0 into 0.0."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet in (aten.clone, aten._to_copy, torch.ops.prims.convert_element_type) or node.target is aten.cat.default:
        return True
    arguments = filled(node)
    other = arguments[1] if len(arguments) > 1 else None
    if isinstance(other, bool) or not isinstance(other, int | float):
        return False
    if packet in (aten.mul, aten.div):
        return other == 1 and (len(arguments) < 3 or arguments[2] is None)
    negative = math.copysign(1.0, other) < 0
    whole = not node.meta["val"].dtype.is_floating_point and not node.meta["val"].dtype.is_complex
    return other == 0 and ((packet is aten.add and (negative or whole)) or (packet is aten.sub and (not negative or whole)))


def _single(node: fx.Node) -> Any:
    tensors: Any = node.args[0]
    return tensors[0] if len(tensors) == 1 else None


def _alike(one: torch.Tensor, other: Any) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and (one.dtype, one.device, one.is_conj(), one.is_neg(), one.layout)
        == (other.dtype, other.device, other.is_conj(), other.is_neg(), other.layout)
        and same_size(tuple(one.shape), tuple(other.shape))
        and same_size(one.stride(), other.stride())
    )


def may_go(known: Aliases, node: fx.Node, source: fx.Node) -> bool:
    """Whether reads of `node` may go to `source`, which holds the same values, without a write or the caller telling the difference."""
    copy, original = known.classes[node], known.classes[source]
    is_output = any(user.op == "output" for user in node.users)
    if copy & original:  # a view
        return not is_output or (source.op == "call_function" and not any(user.op == "output" for user in source.users))
    if copy & known.outputs and original & (known.outputs | known.inputs):
        return False
    for writer in known.written_after(node, copy):
        if original & known.inputs or known.used_from(writer, original):
            return False
    return not any(known.used_from(writer, copy) for writer in known.written_after(node, original))
