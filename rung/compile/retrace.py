"""The pieces of a compiled function as they were traced, to compare them with the compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rung import torch_compat
from rung.attention import SPLIT_OPS
from rung.compile.arguments import dynamic_dims, leaves
from rung.compile.auto_break import trace_with_breaks
from rung.compile.build import SplitGraph, build_steps
from rung.compile.guards import Roots
from rung.compile.plan import CompilePlan
from rung.compile.trace import trace
from rung.compile.whole import layers_of, run_whole
from rung.config import CompileConfig
from rung.errors import StateError


def traced_pieces(function: Callable[..., Any], locals_: Mapping[str, Any], config: CompileConfig, plan: CompilePlan) -> SplitGraph:
    """Trace `function` again for the bound arguments `locals_`, as `plan` was; its pieces run eagerly as FX graphs.

    Raises `StateError` when they are not those of the plan: what the trace reads has changed since."""
    dims = dynamic_dims(function, leaves(locals_), config.dynamic)
    with torch.no_grad(), torch_compat.quiet_compiler():
        traced = (trace_with_breaks if config.breaks == "auto" else trace)(function, locals_, dims, maximum=config.maximum)
        run_whole(traced.graph_module.graph, layers_of(Roots(function)), config)
        graph = build_steps(traced, SPLIT_OPS | set(config.split_ops))
    keys = tuple(piece.key for piece in graph.pieces)
    if keys != tuple(key for key, _ in plan.pieces):
        raise StateError(
            f"a trace of now has other pieces ({len(keys)}) than the plan ({len(plan.pieces)})",
            hint="verify right after the compile",
        )
    return graph
