"""Compile a graph that somebody else traced: the torch.compile backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from rung import torch_compat
from rung.cache import open_store
from rung.compile.driver import Driver
from rung.compile.paths import Path
from rung.compile.trace import TracedGraph
from rung.config import CompileConfig
from rung.counters import Counters


def compile_graph(graph_module: fx.GraphModule, counters: Counters | None = None) -> Callable[..., Any]:
    """Split, compile and stitch a graph from Dynamo; the result takes the graph's inputs and returns its flat outputs as a list."""
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
    counters = Counters() if counters is None else counters
    driver = Driver(CompileConfig(), open_store(counters), counters)
    with torch_compat.quiet_compiler():
        return driver.compile_traced(traced).stitched
