"""Find a traced pattern in a graph, and say where a place that almost fits does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.passes.pattern_graph import Hole, PatternGraph, Term, filled
from rung.passes.report import NearMiss

aten = torch.ops.aten
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default)
REPLACED_BY = "rung_pattern"  # node.meta: the pattern that put a node there


@dataclass(frozen=True, slots=True)
class Found:
    """A place where all operations fit: what each term and constant is bound to."""

    bound: Mapping[Term, fx.Node]
    constants: Mapping[str, Any]

    def operations(self) -> dict[fx.Node, None]:
        return {node: None for term, node in self.bound.items() if term.target is not None}


@dataclass(slots=True)
class Search:
    """One attempt at one anchor. `reason` is the first difference of the attempt that got furthest.

    With `any_dtype` the search goes on behind a dtype that differs, to tell a place that is right but for its dtypes."""

    pattern: PatternGraph
    graph: fx.Graph
    any_dtype: bool = False
    best: int = 0
    reason: str = ""
    dtype_reason: str = ""

    def at_anchor(self, anchor: fx.Node) -> Found | None:
        """The first way to bind all outputs, the first of them to `anchor`."""
        return self._outputs(1, self._solve(((self.pattern.outputs[0], anchor),), Found({}, {})))

    def _outputs(self, index: int, ways: Iterator[Found]) -> Found | None:
        """Bind the outputs from `index` on: one that is part of another is bound already, others are looked for."""
        if index == len(self.pattern.outputs):
            return next(ways, None)
        output = self.pattern.outputs[index]
        for found in ways:
            if output in found.bound:
                rest = self._outputs(index + 1, iter((found,)))
                if rest is not None:
                    return rest
                continue
            taken = {found.bound[term] for term in self.pattern.outputs if term in found.bound}
            for node in self.graph.find_nodes(op="call_function", target=output.target):
                rest = None if node in taken else self._outputs(index + 1, self._solve(((output, node),), found))
                if rest is not None:
                    return rest
        return None

    def _solve(self, todo: tuple[tuple[Any, Any], ...], found: Found) -> Iterator[Found]:
        """All ways to make each (wanted, there) pair of `todo` fit, given what is bound already."""
        if not todo:
            yield found
            return
        (want, have), rest = todo[0], todo[1:]
        if isinstance(want, tuple):
            if isinstance(have, tuple | list) and len(have) == len(want):
                yield from self._solve((*zip(want, have, strict=True), *rest), found)
            else:
                self._miss(found, f"expected {_text(want)}, found {_text(have)}")
        elif isinstance(want, Hole):
            yield from self._constant(want, have, rest, found)
        elif isinstance(want, Term):
            yield from self._term(want, have, rest, found)
        elif type(want) is type(have) and want == have:
            yield from self._solve(rest, found)
        else:
            self._miss(found, f"constant {_text(want)} expected, found {_text(have)}")

    def _constant(self, want: Hole, have: Any, rest: tuple[tuple[Any, Any], ...], found: Found) -> Iterator[Found]:
        if isinstance(have, bool) or not isinstance(have, (want.kind, int) if want.kind is float else want.kind):
            self._miss(found, f"{want.name} must be a {want.kind.__name__} that is known when compiling, found {_text(have)}")
        elif found.constants.get(want.name, have) != have:
            self._miss(found, f"{want.name} is {found.constants[want.name]} in one place and {have} in another")
        else:
            yield from self._solve(rest, Found(found.bound, {**found.constants, want.name: have}))

    def _term(self, want: Term, have: Any, rest: tuple[tuple[Any, Any], ...], found: Found) -> Iterator[Found]:
        if want in found.bound:
            if found.bound[want] is have:
                yield from self._solve(rest, found)
            else:
                self._miss(found, f"{want.name} is {_text(found.bound[want])} in one place and {_text(have)} in another")
            return
        reason = self._why_not(want, have)
        if reason is not None:
            self._miss(found, reason)
            return
        with_this = Found({**found.bound, want: have}, found.constants)
        if want.target is None:
            yield from self._solve(rest, with_this)
            return
        arguments = filled(have)
        yield from self._solve((*zip(want.arguments, arguments, strict=True), *rest), with_this)
        if want.target in _COMMUTATIVE:
            swapped = (arguments[1], arguments[0], *arguments[2:])
            yield from self._solve((*zip(want.arguments, swapped, strict=True), *rest), with_this)

    def _why_not(self, want: Term, have: Any) -> str | None:
        if not isinstance(have, fx.Node):
            return f"a tensor expected for {want.name}, found {_text(have)}"
        value = have.meta.get("val")
        if want.target is not None and have.target is not want.target:
            return f"{want.target} expected, found {_origin(have)}"
        if want.target is None and not isinstance(value, torch.Tensor):
            return f"a tensor expected for {want.name}, found {_text(have)}"
        if want.dtype is not None and isinstance(value, torch.Tensor) and value.dtype != want.dtype:
            what = want.name if want.target is None else f"the result of {want.target}"
            reason = f"{want.dtype} expected for {what}, found {value.dtype}"
            if not self.any_dtype:
                return reason
            self.dtype_reason = self.dtype_reason or reason
        return None

    def _miss(self, found: Found, reason: str) -> None:
        matched = sum(term.target is not None for term in found.bound)
        if matched > self.best:
            self.best, self.reason = matched, reason

    def near_miss(self, anchor: fx.Node, reason: str | None = None) -> NearMiss:
        """The report of a place that does not fit, or that fits and is refused for `reason`."""
        total = len(self.pattern.terms)
        return NearMiss(
            pattern=self.pattern.pattern.name,
            anchor=anchor.name,
            matched=self.best if reason is None else total,
            total=total,
            reason=self.reason if reason is None else reason,
            where=torch_compat.node_location(anchor),
        )


def _origin(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"an input of the piece ({node.name})"
    by = f", put there by {node.meta[REPLACED_BY]}" if REPLACED_BY in node.meta else ""
    return f"{node.target}{by}"


def _text(value: Any) -> str:
    return value.name if isinstance(value, fx.Node | Term | Hole) else repr(value)
