"""Lowering of IR ops that return several tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from rung import torch_compat
from rung.passes.ir import IROp
from rung.passes.pattern_apply import splice


def lower_tuple_ops(graph: fx.Graph, ops: Iterable[IROp]) -> dict[str, int]:
    """Put the body of every op of `ops` that returns a tuple in its place; returns how many of each."""
    counts: dict[str, int] = {}
    for op in ops:
        for node in graph.find_nodes(op="call_function", target=op.overload):
            if isinstance(node.meta["val"], tuple | list):
                _inline(graph, node, op.body, op.name)
                counts[op.name] = counts.get(op.name, 0) + 1
    return counts


def _inline(graph: fx.Graph, node: fx.Node, body: Callable[..., Any], name: str) -> None:
    inputs = list(dict.fromkeys(arg for arg in node.args if isinstance(arg, fx.Node)))

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        return body(*(given[arg] if isinstance(arg, fx.Node) else arg for arg in node.args))

    traced = torch_compat.trace_body(call, [arg.meta["val"] for arg in inputs])
    results = splice(graph, traced, inputs, node, meta_of=node, by=name)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
    graph.eliminate_dead_code()
