"""Arithmetic with a neutral element that has to stay, since what it returns is memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rung.passes.cleanup.aliases import Aliases
from rung.passes.cleanup.noop import may_go
from rung.passes.identity import code_identity, digest
from rung.passes.pattern import same_size

aten = torch.ops.aten
_KEPT: dict[Any, tuple[Any, int]] = {  # operation -> the same with a number, which Inductor leaves alone; the neutral element
    aten.add.Tensor: (aten.add.Scalar, 0),
    aten.sub.Tensor: (aten.sub.Scalar, 0),
    aten.mul.Tensor: (aten.mul.Scalar, 1),
    aten.div.Tensor: (aten.div.Scalar, 1),
}


class KeepCopies:
    """Runs before Inductor puts `x` in the place of `x * 1`, `x / 1`, `x + 0` and `x - 0`. It does so without a look at memory: with a
    constant tensor in every version, with a number since torch 2.14 (pytorch/pytorch#197893). A write into what a piece returns, by a split
    op or by the caller, then lands in the piece's input, or in another of its outputs. Calls for which that matters become the overload
    that takes a number, which is not looked at. Can go when Inductor asks there what it asks before it drops a clone."""

    name = "keep_copies"

    def uuid(self) -> str:
        return digest(code_identity(KeepCopies.run, Aliases._classes_of, may_go))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        dropped: dict[fx.Node, fx.Node] = {}  # what Inductor may put an argument in the place of
        kept = 0
        for node in list(graph.nodes):
            source = _source(node)
            if source is None:
                continue
            known = _Merged(graph, dropped)
            relaid = not same_size(node.meta["val"].stride(), source.meta["val"].stride())
            if may_go(known, node, source) and not (relaid and known.classes[node] & known.outputs):
                dropped[node] = source
                continue
            node.target, neutral = _KEPT[node.target]
            node.args = (source, bool(neutral) if source.meta["val"].dtype == torch.bool else neutral)  # a number would promote it
            kept += 1
        return {"kept": kept}


class _Merged(Aliases):
    """Memory as it is once the arguments of `dropped` stand in their place."""

    def __init__(self, graph: fx.Graph, dropped: Mapping[fx.Node, fx.Node]) -> None:
        self._dropped = dropped
        super().__init__(graph)

    def _classes_of(self, node: fx.Node, stored: dict[int, int]) -> frozenset[int]:
        source = self._dropped.get(node)
        return super()._classes_of(node, stored) if source is None else self.classes[source]


def _source(node: fx.Node) -> fx.Node | None:
    """The argument that Inductor may put in the place of a call, or None."""
    if node.op != "call_function" or node.target not in _KEPT or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    neutral = _KEPT[node.target][1]
    first, second = node.args
    if isinstance(first, fx.Node) and _constant(second) == neutral and _stands_for(first, node):
        return first
    swaps = node.target in (aten.add.Tensor, aten.mul.Tensor)
    return second if swaps and isinstance(second, fx.Node) and _constant(first) == neutral and _stands_for(second, node) else None


def _constant(value: Any) -> Any:
    """The number that a tensor holds in every element, as far as the calls that make it say so, or None."""
    while isinstance(value, fx.Node):
        packet = getattr(value.target, "overloadpacket", None)
        if packet in (aten.full, aten.full_like):
            value = value.args[1]
        elif packet in (aten.expand, aten.view, aten.clone, aten._to_copy, torch.ops.prims.convert_element_type):
            value = value.args[0]
        else:
            return None
    return value if isinstance(value, int | float) else None


def _stands_for(source: fx.Node, node: fx.Node) -> bool:
    """Whether the two differ in strides at most. A call that converts makes memory of its own in any case."""
    one, other = source.meta.get("val"), node.meta.get("val")
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one.dtype, one.device) == (other.dtype, other.device)
        and same_size(tuple(one.shape), tuple(other.shape))
    )
