"""Functional operations whose argument dies with them run in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from rung.passes.cleanup.aliases import Aliases, schema_of
from rung.passes.identity import code_identity, digest, value_identity
from rung.passes.pattern import same_size
from rung.passes.pattern_graph import filled


def is_opaque(node: fx.Node) -> bool:
    """An operation that Inductor calls as it is. It fuses those of torch itself, and a write would only be in its way."""
    return schema_of(node) is not None and node.target.namespace not in ("aten", "prims", "rung")  # type: ignore[union-attr]


class InPlace:
    """Calls the variant that writes into an argument, where one exists and nobody uses that argument's memory afterwards.

    The variant is found by schema: the same arguments, one of them written, in another overload or under the name with an underscore.
    That argument must be a result inside the graph, of the same layout, without elements that share an address, and no other argument
    may share its memory."""

    name = "in_place"

    def __init__(self, applies: Callable[[fx.Node], bool] = is_opaque) -> None:
        self._applies = applies

    def uuid(self) -> str:
        return digest(code_identity(InPlace.run, Aliases._classes_of), value_identity(self._applies, self.name))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        counts: dict[str, int] = {}
        known = Aliases(graph)
        for node in list(graph.nodes):
            if schema_of(node) is None or not self._applies(node):
                continue
            found = next((pair for pair in variants(node.target) if _may_write(known, node, filled(node)[pair[1]])), None)
            if found is None:
                continue
            overload, index = found
            target: Any = filled(node)[index]
            with graph.inserting_before(node):
                new = graph.call_function(overload, node.args, node.kwargs)
            new.meta = {**node.meta, "val": target.meta["val"]}
            node.replace_all_uses_with(new if overload._schema.returns else target)
            graph.erase_node(node)
            known = Aliases(graph)
            counts[str(overload)] = counts.get(str(overload), 0) + 1
        return counts


def variants(target: Any) -> Iterator[tuple[Any, int]]:
    """(overload, index of the argument it writes) of the in-place variants of a functional op."""
    schema = target._schema
    if schema.is_mutable or len(schema.returns) != 1:
        return
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    namespace = getattr(torch.ops, target.namespace)
    packets = (target.overloadpacket, getattr(namespace, f"{target.overloadpacket.__name__}_", None))
    for overload in (getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()):
        arguments = overload._schema.arguments
        written = [index for index, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write]
        if len(written) == 1 and [(argument.name, str(argument.type)) for argument in arguments] == wanted:
            yield overload, written[0]


def _may_write(known: Aliases, node: fx.Node, target: Any) -> bool:
    if not isinstance(target, fx.Node) or target.op != "call_function":
        return False
    memory = known.classes[target]
    others = list(filled(node))
    others.remove(target)
    shared = any(known.classes[other] & memory for other in others if isinstance(other, fx.Node))
    return (
        not memory & (known.inputs | known.outputs)
        and not shared
        and not known.used_after(node, memory)
        and _fits(node.meta.get("val"), target.meta.get("val"))
    )


def _fits(result: Any, target: Any) -> bool:
    if not isinstance(result, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    overlaps = any(str(stride) == "0" and str(size) != "1" for size, stride in zip(target.shape, target.stride(), strict=True))
    return (
        not overlaps
        and (result.dtype, result.device) == (target.dtype, target.device)
        and same_size(tuple(result.shape), tuple(target.shape))
        and same_size(result.stride(), target.stride())
    )
