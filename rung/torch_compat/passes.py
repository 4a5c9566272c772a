"""The seams of Inductor that graph passes enter by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

PASS_OPTION = "post_grad_custom_pre_pass"  # fusions must run before Inductor turns mm + add into addmm
EARLY_OPTION = "joint_custom_pre_pass"  # behind AOTAutograd, before any rewrite of Inductor's


class StopCompile(BaseException):
    """Raised by a pass to end a compile behind it. No `Exception`: Inductor would wrap that."""


def graph_pass(function: Callable[[fx.Graph], None], uuid: bytes) -> Any:
    """Wrap `function` as a custom pass that Inductor runs at a seam. `uuid` enters Inductor's cache keys."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            function(graph)

        def uuid(self) -> bytes:
            return uuid

    return Pass()


def trace_body(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Trace `function` over fake `values` into ATen nodes, decomposed as Inductor would."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    with mode, torch.no_grad():
        traced: fx.GraphModule = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*values)
    traced.graph.eliminate_dead_code()
    return traced


def trace_example(function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """Trace `function` over the layouts of real tensors, as `trace_body`; placeholders are called like the tensors."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors.values()]
    traced = trace_body(function, fakes)
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True):
        node.name = name
    return traced


def may_return_view(op: Any) -> bool:
    """Whether an op may hand back its argument although its schema does not say so, as `reshape` does: a composition of others."""
    kernel_exists: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return not op.is_view and bool(kernel_exists(op.name(), "CompositeImplicitAutograd"))
