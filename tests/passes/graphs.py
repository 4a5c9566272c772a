"""Graphs as the passes see them, without a compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call

from rung import torch_compat
from rung.passes.manager import GraphPass
from rung.passes.report import NearMiss, PassOutcome


def traced(function: Callable[..., Any], **tensors: torch.Tensor) -> fx.GraphModule:
    """`function` in ATen operations, decomposed as in a piece; it is called with the tensors in order."""
    return torch_compat.trace_example(lambda *values: function(*values), tensors)


def traced_module(module: nn.Module, *inputs: Any) -> fx.GraphModule:
    """A module's forward, its parameters as inputs behind `inputs`."""
    parameters = {name.replace(".", "_"): value for name, value in module.named_parameters()}
    names = list(dict(module.named_parameters()))

    def call(*values: Any) -> Any:
        given, weights = values[: len(inputs)], dict(zip(names, values[len(inputs) :], strict=True))
        return functional_call(module, weights, given)

    return traced(call, **{f"input_{index}": value for index, value in enumerate(inputs)}, **parameters)


def run(module: fx.GraphModule, *passes: GraphPass) -> dict[str, int]:
    """Matches by pattern of all passes, in order."""
    found: dict[str, int] = {}
    for item in passes:
        outcome = item.run(module.graph)
        found |= dict(outcome.matches if isinstance(outcome, PassOutcome) else outcome)
    module.graph.lint()
    module.recompile()
    return found


def misses(module: fx.GraphModule, item: GraphPass) -> tuple[NearMiss, ...]:
    outcome = item.run(module.graph)
    assert isinstance(outcome, PassOutcome)
    assert not any(outcome.matches.values()), outcome.matches
    return outcome.near_misses


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def same(module: fx.GraphModule, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor], **tolerance: float) -> None:
    torch.testing.assert_close(module(*tensors.values()), function(*tensors.values()), **tolerance)
