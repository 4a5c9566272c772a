"""Putting one op in place of several nodes, where a provider takes it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from rung.passes.ir import FP8_LINEAR, FP8_LINEAR_GATED, FP8_LINEAR_THREE, FP8_QUANT_STATIC, IROp
from rung.passes.kernels.invariant import NOT_ASKED

META = ("stack_trace", "nn_module_stack", "original_aten")  # the names in traces come from these


def takes(op: IROp, args: tuple[Any, ...]) -> str | None:
    """Why no provider takes the op with such arguments, or None."""
    provider, refused = op.choose(*args)
    if provider is not None:
        return None
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    by_reason.pop(NOT_ASKED, None)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def values_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """What the arguments of a node stand for, without memory."""
    return tuple(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args)


def put(
    graph: fx.Graph, op: IROp, args: tuple[Any, ...], results: Sequence[fx.Node], joined: Sequence[fx.Node], at: fx.Node | None = None
) -> None:
    """Put the op in place of `results`, before `at` or the first of them; `joined` is what it makes superfluous, users first."""
    values = tuple(result.meta["val"] for result in results)
    with graph.inserting_before(at or results[0]):
        node = graph.call_function(op.overload, args)
        # not all of it: Inductor takes some entries, such as the values of the arguments in eager mode, as the new op's own
        node.meta = {key: results[0].meta[key] for key in META if key in results[0].meta}
        node.meta["val"] = values if len(results) > 1 else values[0]
        for index, result in enumerate(results):
            taken = graph.call_function(operator.getitem, (node, index)) if len(results) > 1 else node
            if taken is not node:
                taken.meta = {key: result.meta[key] for key in (*META, "val") if key in result.meta}
            result.replace_all_uses_with(taken)
    for superfluous in dict.fromkeys(joined):
        if not superfluous.users:
            graph.erase_node(superfluous)


def is_scaled_product(node: Any) -> bool:
    """Whether a node is a product of e4m3 rows, not asked to be batch invariant."""
    return isinstance(node, fx.Node) and node.target is FP8_LINEAR.overload and len(node.args) == 6 and isinstance(node.args[1], fx.Node)


def are_products_of(quantised: fx.Node, scale: fx.Node) -> bool:
    """Whether all readers of a static quantisation are products, alone or siblings, that take its scale with it."""
    products = (FP8_LINEAR.overload, FP8_LINEAR_THREE.overload, FP8_LINEAR_GATED.overload)
    return all(user.target in products and user.args[:2] == (quantised, scale) for user in quantised.users)


def quantised_by(graph: fx.Graph, op: IROp, args: tuple[Any, ...], quantised: fx.Node, at: fx.Node, also: fx.Node | None = None) -> None:
    """A call of `op`, whose first results are e4m3 rows and a scale for each, in place of a quantisation; its third is `also`'s.
    Readers of a static quantisation are given these scales in place of the one."""
    with graph.inserting_before(at):
        made = graph.call_function(op.overload, args)
        made.meta = {key: quantised.meta[key] for key in META if key in quantised.meta}
        made.meta["val"] = op.overload(*values_of(args))
        if also is not None:
            also.replace_all_uses_with(_part(graph, made, 2))
        if quantised.target is not FP8_QUANT_STATIC.overload:
            quantised.replace_all_uses_with(made)
            return
        parts = [_part(graph, made, index) for index in range(2)]
    for user in list(quantised.users):
        user.args = (*parts, *user.args[2:])


def _part(graph: fx.Graph, made: fx.Node, index: int) -> fx.Node:
    part = graph.call_function(operator.getitem, (made, index))
    part.meta = {key: made.meta[key] for key in META if key in made.meta} | {"val": made.meta["val"][index]}
    return part
