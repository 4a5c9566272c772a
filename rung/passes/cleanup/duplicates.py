"""One call in place of several of an IR op with the same arguments, such as quantisations of the same rows for three products."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from rung.passes.identity import code_identity, digest


class Duplicates:
    """IR ops are functional, so two calls with the same arguments give the same. A write in place between two calls changes an argument
    by name: Inductor's graphs have their writes behind all reads (`copy_` to an input), and a graph with others is left alone."""

    name = "duplicates"

    def uuid(self) -> str:
        return digest(code_identity(Duplicates.run))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        count = 0
        if any(_writes_early(node) for node in graph.nodes):
            return {"duplicates": count}
        known: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            if not _is_ir_op(node) and not (node.target is operator.getitem and _is_ir_op(node.args[0])):
                continue
            key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
            first = known.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
                count += node.target is not operator.getitem
        return {"duplicates": count}


def _is_ir_op(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None) if isinstance(node, fx.Node) and node.op == "call_function" else None
    return schema is not None and schema.name.startswith("rung::") and not schema.is_mutable


def _writes_early(node: fx.Node) -> bool:
    """A write in place that something behind it may read."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    following = node.next
    while following.op != "output":
        if not getattr(getattr(following.target, "_schema", None), "is_mutable", False):
            return True
        following = following.next
    return False


def _key(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_key(item) for item in value)
    return (type(value), value) if isinstance(value, int | float | bool) else value
