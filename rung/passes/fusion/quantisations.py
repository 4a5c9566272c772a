"""What the fusions with a quantisation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from rung.passes.ir import FP8_QUANT_GROUP, FP8_QUANT_PER_TOKEN, FP8_QUANT_STATIC
from rung.passes.pattern import Pattern
from rung.passes.pattern_pass import PatternPass
from rung.passes.report import NearMiss, PassOutcome

KINDS: dict[str, Callable[..., Any]] = {
    "token": FP8_QUANT_PER_TOKEN.overload,
    "static": FP8_QUANT_STATIC.overload,
    "group": FP8_QUANT_GROUP.overload,
}


class QuantPass(PatternPass):
    """Patterns of an op and a quantisation behind it, by these two. There are many of them: those of which a graph has not both ops cost it
    neither their proof nor their search."""

    def __init__(self, name: str, patterns: Mapping[tuple[Any, Any], Pattern]) -> None:
        super().__init__(name, tuple(patterns.values()))
        self._passes = {ops: PatternPass(pattern.name, (pattern,)) for ops, pattern in patterns.items()}

    def check(self) -> None:
        """Left to `run`."""

    def run(self, graph: fx.Graph) -> PassOutcome:
        there = {node.target for node in graph.nodes if node.op == "call_function"}
        matches = dict.fromkeys((item.name for item in self.patterns), 0)
        misses: list[NearMiss] = []
        for ops, item in self._passes.items():
            if there.issuperset(ops):
                outcome = item.run(graph)
                matches |= outcome.matches
                misses += outcome.near_misses
        return PassOutcome(matches, tuple(misses))
