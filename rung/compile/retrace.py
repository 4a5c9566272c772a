"""The pieces of a compiled function as they were traced, to compare them with the compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rung import torch_compat
from rung.compile.arguments import dynamic_dims, leaves
from rung.compile.auto_break import trace_with_breaks
from rung.compile.build import SplitGraph, split_traced
from rung.compile.plan import CompilePlan
from rung.compile.trace import trace
from rung.config import CompileConfig
from rung.errors import StateError


def traced_pieces(function: Callable[..., Any], locals_: Mapping[str, Any], config: CompileConfig, plan: CompilePlan) -> SplitGraph:
    """Trace `function` again for the bound arguments `locals_`, as `plan` was; its pieces run eagerly as FX graphs.

    Raises `StateError` when they are not those of the plan: what the trace reads has changed since."""
    dims = dynamic_dims(function, leaves(locals_), config.dynamic)
    with torch.no_grad(), torch_compat.quiet_compiler():
        traced = (trace_with_breaks if config.breaks == "auto" else trace)(function, locals_, dims, maximum=config.maximum)
        graph, _ = split_traced(traced, function, config)
    keys = tuple(piece.key for piece in graph.pieces)
    if keys != tuple(key for key, _ in plan.pieces):
        raise StateError(
            f"a trace of now has other pieces ({len(keys)}) than the plan ({len(plan.pieces)})",
            hint="verify right after the compile",
        )
    return graph
