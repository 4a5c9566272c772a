"""Whether a place that fits may be replaced, and the replacement itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.passes.pattern import Match, same_size
from rung.passes.pattern_graph import PatternGraph
from rung.passes.pattern_match import REPLACED_BY, Found


def replace(graph: fx.Graph, traced: PatternGraph, found: Found, gone: set[fx.Node]) -> str | None:
    """Put the replacement there and add the nodes that went to `gone`, or say why not."""
    pattern = traced.pattern
    operations = found.operations()
    outputs = [found.bound[term] for term in traced.outputs]
    tensors = {term.name: node for term, node in found.bound.items() if term.target is None}
    ordered = {name: tensors[name] for name in traced.variant}
    order = {node: index for index, node in enumerate(graph.nodes)}
    first, last = min(operations, key=order.__getitem__), max(operations, key=order.__getitem__)
    before = max((first, *(node.next for node in ordered.values())), key=order.__getitem__)
    reason = (
        _used_elsewhere(operations, outputs, pattern.shared)
        or _written_between(order, first, last, graph)
        or _needed_before(order, outputs, operations, before)
        or pattern.precondition(Match(ordered, found.constants))
    )
    if reason is not None:
        return reason
    body = torch_compat.trace_body(
        lambda *values: pattern.replacement(**dict(zip(ordered, values, strict=True)), **found.constants),
        [node.meta["val"] for node in ordered.values()],
    )
    results = _results(body)
    reason = next((why for old, new in zip(outputs, results, strict=True) if (why := _differs(old.meta["val"], new.meta["val"]))), None)
    if reason is not None:
        return f"the replacement would give {reason}"
    new = splice(graph, body, tuple(ordered.values()), before, meta_of=outputs[0], by=pattern.name)
    for old, result in zip(outputs, new, strict=True):
        old.replace_all_uses_with(result)
    for node in sorted(operations, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)
            gone.add(node)
    return None


def splice(
    graph: fx.Graph, body: fx.GraphModule, inputs: Sequence[fx.Node], before: fx.Node, *, meta_of: fx.Node, by: str
) -> list[fx.Node]:
    """Copy a traced body in front of `before` and return the nodes of its results. Names in kernels and traces come from `meta_of`."""
    copies: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(before):
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copies[inner] = graph.node_copy(inner, lambda used: copies[used])
            kept = {key: meta_of.meta[key] for key in ("stack_trace", "original_aten", "nn_module_stack") if key in meta_of.meta}
            copies[inner].meta |= kept | {REPLACED_BY: by}
    return [copies[result] for result in _results(body)]


def _results(body: fx.GraphModule) -> list[fx.Node]:
    output: Any = next(node for node in reversed(body.graph.nodes) if node.op == "output").args[0]
    return list(output) if isinstance(output, tuple | list) else [output]


def _used_elsewhere(operations: dict[fx.Node, None], outputs: Sequence[fx.Node], shared: Sequence[str]) -> str | None:
    for node in operations:
        other = next((user for user in node.users if user not in operations), None)
        if other is not None and node not in outputs and _short_name(node) not in shared:
            return f"{node.name} ({node.target}) has another user: {other.name}"
    return None


def _short_name(node: fx.Node) -> str:
    return str(node.target).split(".")[-2] if "." in str(node.target) else str(node.target)


def _written_between(order: dict[fx.Node, int], first: fx.Node, last: fx.Node, graph: fx.Graph) -> str | None:
    """Something is written in place between the operations: a read could move across it."""
    for node in graph.nodes:
        if order[first] < order[node] < order[last] and getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            return f"{node.name} ({node.target}) writes in place between its operations"
    return None


def _needed_before(order: dict[fx.Node, int], outputs: Sequence[fx.Node], operations: dict[fx.Node, None], before: fx.Node) -> str | None:
    for output in outputs:
        for user in output.users:
            if user not in operations and order[user] < order[before]:
                return f"{user.name} needs {output.name} before all inputs of the replacement exist"
    return None


def _differs(old: torch.Tensor, new: torch.Tensor) -> str | None:
    for what in ("dtype", "device"):
        if getattr(old, what) != getattr(new, what):
            return f"{what} {getattr(new, what)} for {getattr(old, what)}"
    if not same_size(tuple(old.shape), tuple(new.shape)):
        return f"shape {tuple(new.shape)} for {tuple(old.shape)}"
    return None if same_size(old.stride(), new.stride()) else f"strides {new.stride()} for {old.stride()}"
