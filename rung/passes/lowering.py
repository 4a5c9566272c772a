"""Lower IR ops: to the provider that takes them, which stays an op of its own and chooses by the number of rows at each call, or to the
native body, spliced into the graph so that Inductor fuses it with its neighbours."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from rung import torch_compat
from rung.passes.ir import IR_OPS, IROp
from rung.passes.providers import OwnProvider
from rung.passes.report import NearMiss, PassOutcome


def lower(graph: fx.Graph, ops: Iterable[IROp] = IR_OPS) -> dict[str, int]:
    """Lower every IR op in `graph`; returns how many of each went where: "name" to its body, "name (provider: what it says)"."""
    table = {op.overload: op for op in ops}
    counts: dict[str, int] = {}
    for node in list(graph.nodes):
        op = table.get(node.target) if node.op == "call_function" else None
        if op is None:
            continue
        values = _values(node)
        provider, _ = op.choose(*values)
        if provider is None:
            inline(graph, node, op.body)
            found = op.name
        else:
            found = f"{op.name} ({op.describe(*values)})"
        counts[found] = counts.get(found, 0) + 1
    return counts


def lower_to(graph: fx.Graph, providers: Iterable[OwnProvider]) -> PassOutcome:
    """Let providers from outside take the ops that they are for, the first of them that takes the arguments."""
    counts: dict[str, int] = {}
    misses: list[NearMiss] = []
    for provider in providers:
        counts[provider.label] = 0
        for node in graph.find_nodes(op="call_function", target=provider.meaning.overload):
            reason = provider.why_not(*_values(node))
            if reason is None:
                inline(graph, node, provider.run)
                counts[provider.label] += 1
            else:
                where = torch_compat.node_location(node)
                misses.append(NearMiss(pattern=provider.label, anchor=node.name, matched=1, total=1, reason=reason, where=where))
    return PassOutcome(counts, tuple(misses))


def _values(node: fx.Node) -> tuple[Any, ...]:
    return tuple(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args)


def inline(graph: fx.Graph, node: fx.Node, body: Callable[..., Any]) -> None:
    """Trace `body` over the node's fake values and splice the result in its place. The body returns a tensor or a tuple of them."""
    inputs = list(dict.fromkeys(arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)))

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args = [given[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
        kwargs = {key: given[arg] if isinstance(arg, fx.Node) else arg for key, arg in node.kwargs.items()}
        return body(*args, **kwargs)

    traced = torch_compat.trace_body(call, [arg.meta["val"] for arg in inputs])
    placeholders = [inner for inner in traced.graph.nodes if inner.op == "placeholder"]
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copies[inner] = graph.node_copy(inner, lambda used: copies[used])
            # the names in generated kernels and traces come from these
            copies[inner].meta |= {key: node.meta[key] for key in ("stack_trace", "original_aten", "nn_module_stack") if key in node.meta}
    result = next(inner for inner in reversed(traced.graph.nodes) if inner.op == "output").args[0]
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(copies[result])
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(copies[result[user.args[1]]])
            graph.erase_node(user)
    graph.erase_node(node)
