"""A pass made of patterns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import fx

from rung.errors import PatternError
from rung.passes import pattern, pattern_apply, pattern_check, pattern_graph, pattern_match
from rung.passes.identity import digest
from rung.passes.pattern import Pattern
from rung.passes.pattern_graph import PatternGraph, trace_pattern
from rung.passes.pattern_match import Search
from rung.passes.report import NearMiss, PassOutcome

_MACHINERY = (pattern, pattern_graph, pattern_match, pattern_apply, pattern_check, sys.modules[__name__])
_NEAR = 0.25  # of the operations must fit for a place to be reported; matching begins at the result and ends at the first difference
_REPORTED = 8  # near misses of a pass in one piece


class PatternPass:
    """Replaces every match of its patterns, in their order. Implements `GraphPass`.

    Patterns are traced when a piece first needs them, and run against their replacements before the first piece is changed: a warm start
    pays for neither."""

    def __init__(self, name: str, patterns: Sequence[Pattern]) -> None:
        names = [item.name for item in patterns]
        if len(set(names)) != len(names):
            raise PatternError(f"pass {name!r} has two patterns of one name: {sorted(names)}", hint="name each of them differently")
        self.name = name
        self.patterns = tuple(patterns)
        self._checked = False
        self._traced: dict[tuple[str, int], PatternGraph] = {}

    def uuid(self) -> str:
        return self._uuid

    @cached_property
    def _uuid(self) -> str:
        return digest(self.name, *(inspect.getsource(module) for module in _MACHINERY), *(item.uuid() for item in self.patterns))

    def check(self) -> None:
        """Raise `PatternError` for a pattern whose replacement computes something else. Done once."""
        if not self._checked:
            for item in self.patterns:
                pattern_check.check_pattern(item)
            self._checked = True

    def run(self, graph: fx.Graph) -> PassOutcome:
        self.check()
        matches: dict[str, int] = {}
        misses: list[NearMiss] = []
        for item in self.patterns:
            matches[item.name], missed = self._run(item, graph)
            misses += missed
        misses.sort(key=lambda miss: -miss.matched / miss.total)
        return PassOutcome(matches, tuple(misses[:_REPORTED]))

    def _run(self, item: Pattern, graph: fx.Graph) -> tuple[int, list[NearMiss]]:
        matched = 0
        missed: dict[fx.Node, NearMiss] = {}
        gone: set[fx.Node] = set()
        dtypes = {value.dtype for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)}
        for index, variant in enumerate(item.variants):
            if next(iter(variant.values())) not in dtypes:
                continue
            traced = self._trace(item, index)
            for anchor in graph.find_nodes(op="call_function", target=traced.anchor):
                if anchor in gone:
                    continue
                search = Search(traced, graph)
                found = search.at_anchor(anchor)
                reason = _dtype_reason(traced, graph, anchor) if found is None else pattern_apply.replace(graph, traced, found, gone)
                if found is not None and reason is None:
                    matched += 1
                    missed.pop(anchor, None)
                elif reason is not None or search.best >= _NEAR * len(traced.terms):
                    miss = search.near_miss(anchor, reason)
                    if anchor not in missed or missed[anchor].matched < miss.matched:
                        missed[anchor] = miss
        return matched, list(missed.values())

    def _trace(self, item: Pattern, index: int) -> PatternGraph:
        key = (item.name, index)
        if key not in self._traced:
            self._traced[key] = trace_pattern(item, item.variants[index])
        return self._traced[key]


def _dtype_reason(traced: PatternGraph, graph: fx.Graph, anchor: fx.Node) -> str | None:
    """Which dtype prevents a match, where nothing else does."""
    search = Search(traced, graph, any_dtype=True)
    return None if search.at_anchor(anchor) is None else search.dtype_reason
