"""Compile a graph that somebody else traced: the torch.compile backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.cache import open_store
from rung.compile.ambient import note_blocks
from rung.compile.driver import Driver
from rung.compile.entry import EagerReason
from rung.compile.paths import Path
from rung.compile.trace import TracedGraph
from rung.config import CompileConfig
from rung.counters import Count, Counters


def compile_graph(graph_module: fx.GraphModule, counters: Counters | None = None) -> Callable[..., Any]:
    """Split, compile and stitch a graph from Dynamo; the result takes the graph's inputs and returns its flat outputs as a list.

    Compiled code is for inference: under autocast, which Dynamo leaves to its backend, where a gradient is wanted, and where a value is
    read on the host the graph runs as it is, counted with the reason."""
    counters = Counters() if counters is None else counters
    reason = _eager_reason(graph_module.graph)
    if reason is not None:
        return _eagerly(graph_module, counters, reason)
    original = copy.deepcopy(graph_module)  # splitting changes the graph
    eagerly = _eagerly(original, counters, EagerReason.GRADIENT)
    compiled = _compile(graph_module, counters)

    def run(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            return eagerly(*inputs)
        return compiled(*inputs)

    return run


def _eager_reason(graph: fx.Graph) -> EagerReason | None:
    """Why no call of a graph can run compiled."""
    if any(torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda")):
        return EagerReason.AUTOCAST
    given: set[Any] = set()
    for node in graph.nodes:
        values = node.meta.get("example_value")
        for value in values if isinstance(values, tuple | list) else (values,):
            symbols = torch_compat.free_symbols(value)
            if node.op == "placeholder":
                given |= symbols
            if isinstance(value, torch.SymFloat) or not symbols <= given:  # Dynamo hands a float that changes over in a tensor
                return EagerReason.VALUES
    return None


def _eagerly(graph_module: fx.GraphModule, counters: Counters, reason: EagerReason) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        counters.add(Count.EAGER_CALLS)
        counters.add(f"eager.{reason}")
        return graph_module(*inputs)

    return run


def _compile(graph_module: fx.GraphModule, counters: Counters) -> Callable[..., Any]:
    note_blocks(graph_module.graph)
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(Path("inputs", (("item", index),)) for index in range(len(placeholders)))
    traced = TracedGraph(
        graph_module=graph_module,
        inputs=inputs,
        symbols={},
        bounds={},
        template={"kind": "list", "items": []},
        sources=(),
        unified={},
        bytecode=None,
    )
    driver = Driver(CompileConfig(), open_store(counters), counters)
    with torch_compat.quiet_compiler():
        return driver.compile_traced(traced).stitched
