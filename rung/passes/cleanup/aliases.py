"""Which values of a graph may share memory, who writes into it, and who reads it when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.passes.pattern_graph import filled


class Aliases:
    """Memory classes of one graph as it is now: two values share memory only when they share a class. Errs towards sharing."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.classes: dict[fx.Node, frozenset[int]] = {}
        self.outputs: frozenset[int] = frozenset()
        self._readers: dict[int, list[fx.Node]] = {}
        self._writers: dict[int, list[fx.Node]] = {}
        stored: dict[int, int] = {}
        for node in graph.nodes:
            self.classes[node] = self._classes_of(node, stored)
            for used in node.all_input_nodes:
                for memory in self.classes[used]:
                    self._readers.setdefault(memory, []).append(node)
            for used in writes(node):
                for memory in self.classes[used]:
                    self._writers.setdefault(memory, []).append(node)
            if node.op == "output":
                self.outputs = frozenset().union(*(self.classes[used] for used in node.all_input_nodes))
        self.inputs = frozenset().union(*(self.classes[node] for node in graph.nodes if node.op in ("placeholder", "get_attr")))

    def _classes_of(self, node: fx.Node, stored: dict[int, int]) -> frozenset[int]:
        own = self.order[node]
        if node.op in ("placeholder", "get_attr"):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                return frozenset((stored.setdefault(torch_compat.storage_identity(value), own),))
            return frozenset((own,))
        shared: set[int] = set()
        for used in may_alias(node):
            shared |= self.classes[used]
        return frozenset(shared) or frozenset((own,))

    def written_after(self, node: fx.Node, memory: frozenset[int]) -> Iterator[fx.Node]:
        """Nodes behind `node` that write into `memory`."""
        yield from (writer for item in memory for writer in self._writers.get(item, ()) if self.order[writer] > self.order[node])

    def used_from(self, position: fx.Node, memory: frozenset[int]) -> bool:
        """Whether `memory` is used by `position` or behind it, or handed out at the end."""
        at = self.order[position]
        return any(self.order[reader] >= at for item in memory for reader in self._readers.get(item, ()))

    def used_after(self, node: fx.Node, memory: frozenset[int]) -> bool:
        """Whether `memory` is used behind `node`, or handed out at the end."""
        at = self.order[node]
        return any(self.order[reader] > at for item in memory for reader in self._readers.get(item, ()))


def schema_of(node: fx.Node) -> Any | None:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def is_pure_function(node: fx.Node) -> bool:
    """Python's own operators and torch's arithmetic on sizes: no effect, and no tensor but out of a tuple."""
    return node.op == "call_function" and (
        getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
        or getattr(node.target, "__name__", "").startswith("sym_")
    )


def writes(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into. Calls without a schema may write into all of them."""
    schema = schema_of(node)
    if schema is not None:
        return [
            used
            for argument, value in zip(schema.arguments, filled(node), strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write
            for used in _nodes(value)
        ]
    return list(node.all_input_nodes) if node.op == "call_function" and not is_pure_function(node) else []


def may_alias(node: fx.Node) -> list[fx.Node]:
    """The arguments that a result may share memory with."""
    schema = schema_of(node)
    if schema is None:
        return list(node.all_input_nodes) if node.op == "call_function" else []
    if torch_compat.may_return_view(node.target):
        return list(node.all_input_nodes)
    if all(result.alias_info is None for result in schema.returns):
        return []
    return [
        used
        for argument, value in zip(schema.arguments, filled(node), strict=True)
        if argument.alias_info is not None
        for used in _nodes(value)
    ]


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [used for item in value for used in _nodes(item)] if isinstance(value, tuple | list) else []
