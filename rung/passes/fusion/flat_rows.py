"""Operations on rows [1, tokens, size], as transformers has them, become the same on [tokens, size], as products have them.

A layer of transformers puts a view between every product and what stands around it. Behind this pass they meet.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rung.passes.fused_ops import GELU_MUL, SILU_MUL
from rung.passes.identity import code_identity, digest
from rung.passes.ir import (
    FP8_LINEAR,
    FP8_QUANT_GROUP,
    FP8_QUANT_PER_TOKEN,
    FP8_QUANT_STATIC,
    GELU_AND_MUL,
    RMS_NORM,
    SILU_AND_MUL,
)
from rung.passes.pattern import same_size

aten = torch.ops.aten
# Row-wise operations, and how many of their first arguments have rows.
_ROW_WISE: dict[Any, int] = {
    aten.add.Tensor: 2,
    RMS_NORM.overload: 1,
    SILU_AND_MUL.overload: 1,
    GELU_AND_MUL.overload: 1,
    SILU_MUL.overload: 2,
    GELU_MUL.overload: 2,
    FP8_QUANT_STATIC.overload: 1,
    FP8_QUANT_PER_TOKEN.overload: 1,
    FP8_QUANT_GROUP.overload: 1,
    FP8_LINEAR.overload: 2,
}
_VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default)


class FlatRows:
    """Preconditions: all arguments with rows are contiguous [1, tokens, size] of equal tokens; a scale may also be one number. The results
    come back as [1, tokens, size] for readers that are not row-wise themselves."""

    name = "flat_rows"

    def uuid(self) -> str:
        return digest(code_identity(FlatRows.run))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        flat: dict[fx.Node, fx.Node] = {}  # [1, tokens, size] -> [tokens, size]
        count = 0
        for node in list(graph.nodes):
            rows = _ROW_WISE.get(node.target, 0) if node.op == "call_function" and not node.kwargs else 0
            if rows and _fits(node, rows):
                _flatten(graph, node, rows, flat)
                count += 1
            elif node.target in _VIEWS and node.args[0] in flat and _is_flat_view(node):
                node.replace_all_uses_with(flat[node.args[0]])
                graph.erase_node(node)
        for node in reversed(list(graph.nodes)):
            if node.target in (aten.squeeze.dim, *_VIEWS) and not node.users:
                graph.erase_node(node)
        return {"flat_rows": count}


def _fits(node: fx.Node, rows: int) -> bool:
    if any(user.target is not operator.getitem for user in node.users) and isinstance(node.meta["val"], tuple):
        return False
    first = node.args[0]
    return all(_has_rows(arg, first) or (index > 0 and _is_number(node, arg)) for index, arg in enumerate(node.args[:rows]))


def _has_rows(arg: Any, like: Any) -> bool:
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 3 or not same_size(value.shape[0], 1):
        return False
    return same_size(value.shape[1], like.meta["val"].shape[1]) and value.is_contiguous()


def _is_number(node: fx.Node, arg: Any) -> bool:
    """Whether an argument is one scale for all rows, or there is none."""
    if node.target is not FP8_LINEAR.overload:
        return False
    return arg is None or (isinstance(arg, fx.Node) and arg.meta["val"].dim() == 1)


def _is_flat_view(node: fx.Node) -> bool:
    source: Any = node.args[0]
    return same_size(tuple(node.meta["val"].shape), tuple(source.meta["val"].shape[1:]))


def _flatten(graph: fx.Graph, node: fx.Node, rows: int, flat: dict[fx.Node, fx.Node]) -> None:
    with graph.inserting_before(node):
        args = [_flat(graph, arg, flat) if index < rows and _is_rows(arg) else arg for index, arg in enumerate(node.args)]
        made = _call(graph, node.target, tuple(args), node)
        if not isinstance(made.meta["val"], tuple):
            _put_back(graph, node, made, flat)
        else:
            for part in list(node.users):
                _put_back(graph, part, _call(graph, operator.getitem, (made, part.args[1]), part), flat)
    graph.erase_node(node)


def _put_back(graph: fx.Graph, node: fx.Node, made: fx.Node, flat: dict[fx.Node, fx.Node]) -> None:
    """Readers of `node` get `made` with a leading dimension of 1."""
    whole = _call(graph, aten.unsqueeze.default, (made, 0), node)
    flat[whole] = made
    node.replace_all_uses_with(whole)
    if node.target is operator.getitem:
        graph.erase_node(node)


def _flat(graph: fx.Graph, node: Any, flat: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in flat:
        source: Any = node.args[0] if node.target in _VIEWS else None
        two = isinstance(source, fx.Node) and source.meta["val"].dim() == 2 and source.meta["val"].is_contiguous()
        if two and same_size(tuple(source.meta["val"].shape), tuple(node.meta["val"].shape[1:])):
            flat[node] = source
        else:
            with graph.inserting_after(node):
                flat[node] = _call(graph, aten.squeeze.dim, (node, 0), node)
    return flat[node]


def _is_rows(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and arg.meta["val"].dim() == 3


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in ("stack_trace", "nn_module_stack", "original_aten") if key in like.meta}
    node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    return node
