"""Products that the rows of a batch go through, made batch invariant: in the graph of a piece, and in eager calls.

What else a piece computes is invariant as it is: Inductor compiles one kernel for all numbers of rows, and each of its reductions is over
elements of one row.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.errors import CompileError
from rung.passes.fusion.products import Product, product_of
from rung.passes.identity import digest
from rung.passes.ir import FP8_LINEAR, LINEAR

aten = torch.ops.aten
_INVARIANT = {LINEAR.overload: 4, FP8_LINEAR.overload: 6}  # ops that can be told to be, by an argument at this place
# What sums over k in an order that may depend on the number of rows.
_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "_scaled_mm", "_int_mm", "convolution", "_addmm_activation"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
)


class BatchInvariant:
    """Products by weights [n, k] become `linear` or `fp8_linear` with `invariant`. A product that cannot is an error: what remained would
    give a row other bits in another batch, without a word."""

    name = "batch_invariant"

    def uuid(self) -> str:
        return digest(self.name, inspect.getsource(sys.modules[__name__]))

    def run(self, graph: fx.Graph) -> dict[str, int]:
        count = 0
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            place = _INVARIANT.get(node.target)
            if place is not None:
                _set_argument(node, place)
            elif _is_product(node):
                found = product_of(node)
                if type(found) is not Product:
                    if _sums_nothing(node):
                        continue
                    raise _refusal(node)
                _replace(graph, node, found)
            elif str(node.target).startswith("rung.") and "linear" in str(node.target):
                raise _refusal(node)
            else:
                continue
            count += 1
        return {"products": count}


def _set_argument(node: fx.Node, place: int) -> None:
    node.args, node.kwargs = _asked(node.target, place, node.args, node.kwargs), {}
    node.meta = _meta(node)


def _asked(overload: Any, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call of an op of `_INVARIANT` by position, with batch invariance asked for."""
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return (*(given[name] for name in names[:place]), True)


def _replace(graph: fx.Graph, node: fx.Node, product: Product) -> None:
    with graph.inserting_before(node):
        made = graph.call_function(LINEAR.overload, (product.x, *product.weight, "", True))
    made.meta = _meta(node)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _meta(node: fx.Node) -> dict[str, Any]:
    """Not all of it: Inductor takes some entries, such as the values of the arguments in eager mode, as the changed call's."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack", "original_aten", "val") if key in node.meta}


def _is_product(node: fx.Node) -> bool:
    return isinstance(node.target, torch_compat.OpOverload) and node.target.name().removeprefix("aten::").partition(".")[0] in _PRODUCTS


def _sums_nothing(node: fx.Node) -> bool:
    """Whether a product has one summand, as the outer product of positions and frequencies has."""
    operands = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    return len(operands) >= 2 and operands[-2].shape[-1] == 1 and node.target in (aten.mm.default, aten.bmm.default)


def _refusal(node: fx.Node) -> CompileError:
    return CompileError(
        f"{node.target} is not batch invariant{torch_compat.node_location(node)}",
        hint="multiply rows by a weight [n, k], as nn.Linear does, or leave batch_invariant out",
    )


class InvariantProducts(torch_compat.TorchDispatchMode):
    """Inside of it eager products by weights are batch invariant."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        place = _INVARIANT.get(function)
        if place is not None:
            return function(*_asked(function, place, args, given))
        if function in (aten.mm.default, aten.addmm.default) and not given:
            weight = args[-1].t()
            bias = args[0] if function is aten.addmm.default else None
            return torch.ops.rung.linear(args[-2], weight, bias, "", True)
        return function(*args, **given)
