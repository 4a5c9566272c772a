"""What Inductor computes in place (`torch._inductor.fx_passes.reinplace`, its last pass over a graph)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

LATE_OPTION = "post_grad_custom_post_pass"  # the last seam before that pass


def updated_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory may become that of a functional call's results."""
    if node.op != "call_function":
        return []
    if node.target is torch.ops.higher_order.auto_functionalized_v2:
        return [base for base in node.kwargs["_all_bases"] if isinstance(base, fx.Node)]  # type: ignore[union-attr]
    if _is_triton_call(node):
        given: Any = node.kwargs
        return [given["kwargs"][name] for name in given["tensors_to_clone"]]
    first = node.args[0] if node.args and _updates_first(node.target) else None
    if isinstance(first, fx.Node):
        return [first]
    return [item for item in first if isinstance(item, fx.Node)] if isinstance(first, list | tuple) else []


def updated_argument(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the tensor `node` may get, if it is a result of such a call."""
    if not is_result(node):
        first = node.args[0] if node.args else None
        return first if isinstance(first, fx.Node) and updated_arguments(node) == [first] else None
    call: Any = node.args[0]
    index: Any = node.args[1]
    found: fx.Node | None
    if _is_triton_call(call):
        found = call.kwargs["kwargs"].get(index)
    elif call.target is torch.ops.higher_order.auto_functionalized_v2:  # its own results, at least one, and then the arguments
        index -= max(1, len(call.args[0]._schema.returns))
        found = call.kwargs["_all_bases"][index] if index >= 0 else None
    else:
        found = call.args[0][index]
    return found


def is_result(node: fx.Node) -> bool:
    """Whether `node` takes a result out of such a call of several."""
    call: Any = node.args[0] if node.target is operator.getitem else None
    return isinstance(call, fx.Node) and bool(updated_arguments(call))


def change_reads(node: fx.Node, change: Callable[[fx.Node], Any]) -> None:
    """Replace what such a call only reads."""
    if node.target is torch.ops.higher_order.auto_functionalized_v2:
        node.kwargs = {k: value if k == "_all_bases" else fx.map_arg(value, change) for k, value in node.kwargs.items()}
    elif _is_triton_call(node):
        given: Any = node.kwargs["kwargs"]
        written: Any = node.kwargs["tensors_to_clone"]
        new = {name: value if name in written else fx.map_arg(value, change) for name, value in given.items()}
        node.kwargs = {**node.kwargs, "kwargs": new}
    else:
        node.args = (node.args[0], *fx.map_arg(node.args[1:], change))
        node.kwargs = fx.map_arg(node.kwargs, change)


def is_opaque_update(node: fx.Node) -> bool:
    """Whether the call is of an op or kernel that Inductor cannot look into."""
    return node.target is torch.ops.higher_order.auto_functionalized_v2 or _is_triton_call(node)


def scatters_view(node: fx.Node) -> bool:
    """Whether the second argument is the new content of a view of the first."""
    from torch._inductor.fx_passes.reinplace import _SCATTER_OP_TO_VIEW

    return node.target in _SCATTER_OP_TO_VIEW


def _is_triton_call(node: fx.Node) -> bool:
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    return node.target is triton_kernel_wrapper_functional


def _updates_first(target: Any) -> bool:
    from torch._inductor.fx_passes.reinplace import _SCATTER_OP_TO_VIEW, inplaceable_foreach_ops, inplaceable_ops

    return target in _SCATTER_OP_TO_VIEW or target in inplaceable_ops or target in inplaceable_foreach_ops
