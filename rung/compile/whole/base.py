"""What passes over a whole graph share: the graph as Dynamo leaves it, and how to walk it.

Its nodes are torch functions and methods with `example_value`s, not ATen operations: a break stays what the user's code calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from rung import torch_compat
from rung.attention import Attention
from rung.passes.report import NearMiss, PassOutcome

# Methods that leave the elements of a contiguous tensor in their order.
_VIEWS = frozenset({"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous"})
_VIEW_FUNCTIONS = frozenset({torch.unsqueeze, torch.squeeze, torch.flatten, torch.reshape, torch.unflatten})


@dataclass(frozen=True, slots=True)
class WholeGraph:
    """A traced graph and the attention layers of the module that it was traced from, by name."""

    graph: fx.Graph
    layers: Mapping[str, Attention]

    def precedes(self, first: fx.Node, second: fx.Node) -> bool:
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        return order[first] < order[second]


class WholePass(Protocol):
    """A rewrite of a whole graph. `uuid` covers its source; `check` raises `PatternError` where the replacement computes something else."""

    name: str

    def uuid(self) -> str: ...

    def check(self) -> None: ...

    def run(self, whole: WholeGraph) -> PassOutcome: ...


def op_name(node: Any) -> str:
    """ "namespace::name" of a registered op's call, or an empty text."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    overload = torch_compat.single_overload(node.target)
    return str(overload.name()).partition(".")[0] if isinstance(overload, torch_compat.OpOverload) else ""


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a registered op's call by name, defaults included."""
    schema = torch_compat.single_overload(node.target)._schema
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema.arguments}


def fake(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["example_value"]
    return value


def is_view(node: Any) -> bool:
    return isinstance(node, fx.Node) and (
        (node.op == "call_method" and node.target in _VIEWS) or (node.op == "call_function" and node.target in _VIEW_FUNCTIONS)
    )


def behind_views(node: Any) -> tuple[Any, list[fx.Node]]:
    """What a chain of views looks at, and the chain, first view first."""
    views: list[fx.Node] = []
    while is_view(node):
        views.insert(0, node)
        node = node.args[0]
    return node, views


def calls(node: Any, *names: str) -> bool:
    """Whether a node is one of these functions or methods, by name: `mul` stands for `*`, `torch.mul` and `Tensor.mul`."""
    return isinstance(node, fx.Node) and str(getattr(node.target, "__name__", node.target)) in names


def refresh(node: fx.Node) -> None:
    """Compute a node's `example_value` anew from those of its arguments."""
    values = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["example_value"])
    args, kwargs = values[0], values[1]
    if node.op == "call_method":
        node.meta["example_value"] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        function: Any = node.target
        node.meta["example_value"] = function(*args, **kwargs)


def miss(pattern: str, node: fx.Node, matched: int, total: int, reason: str) -> NearMiss:
    return NearMiss(pattern=pattern, anchor=node.name, matched=matched, total=total, reason=reason, where=torch_compat.node_location(node))
