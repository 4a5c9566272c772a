"""A pattern's `search` as terms: operations, arguments, and holes where numbers are captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.errors import PatternError
from rung.passes.pattern import Draw, Pattern, Variant


@dataclass(frozen=True, slots=True)
class Hole:
    """The place of a number. `kind` is its type; a whole number is accepted for a float."""

    name: str
    kind: type


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """An operation (`target`, arguments with defaults filled in) or, without a target, a tensor argument of the pattern."""

    name: str
    target: Any
    arguments: tuple[Any, ...] = field(repr=False)
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class PatternGraph:
    """`outputs[0]` is the anchor at which a match begins."""

    pattern: Pattern
    variant: Variant
    outputs: tuple[Term, ...]
    terms: tuple[Term, ...]  # the operations

    @property
    def anchor(self) -> Any:
        return self.outputs[0].target


def filled(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a call in the order of the op's schema, defaults included, so that two ways to write a call are one."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return (*node.args, *(value for _, value in sorted(node.kwargs.items())))
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return tuple(given.get(argument.name, argument.default_value) for argument in schema.arguments)


def trace_pattern(pattern: Pattern, variant: Variant) -> PatternGraph:
    """Trace `search` with two draws: a number that differs between them is one of the constants, or the pattern is refused."""
    runs = [_trace(pattern, variant, number) for number in (0, 1)]
    (first, constants), (second, others) = runs
    if [node.target for node in first if node.op == "call_function"] != [node.target for node in second if node.op == "call_function"]:
        raise PatternError(
            f"pattern {pattern.name!r}: its operations depend on sizes or numbers", hint="write one pattern for each of the forms"
        )
    terms: dict[fx.Node, Term] = {}
    used: set[str] = set()

    def convert(left: Any, right: Any) -> Any:
        if isinstance(left, fx.Node):
            return terms[left]
        if isinstance(left, tuple | list):
            if len(left) != len(right):
                raise _size_error(pattern, left, right)
            return tuple(convert(a, b) for a, b in zip(left, right, strict=True))
        if type(left) is type(right) and left == right:
            return left
        name = next((name for name in constants if left == constants[name] and right == others[name]), None)
        if name is None:
            raise _size_error(pattern, left, right)
        used.add(name)
        return Hole(name, type(constants[name]))

    outputs: tuple[Term, ...] = ()
    for left, right in zip(first, second, strict=True):
        if left.op == "output":
            outputs = _flat(convert(left.args[0], right.args[0]))
        elif left.op == "placeholder":
            terms[left] = Term(left.name, None, (), left.meta["val"].dtype)
        else:
            arguments = convert(filled(left), filled(right))
            value = left.meta.get("val")
            terms[left] = Term(left.name, left.target, arguments, value.dtype if isinstance(value, torch.Tensor) else None)
    unread = [node.name for node in first if node.op == "placeholder" and not node.users]
    _check(pattern, outputs, [name for name in constants if name not in used], unread)
    return PatternGraph(pattern, variant, outputs, tuple(term for term in terms.values() if term.target is not None))


def _trace(pattern: Pattern, variant: Variant, number: int) -> tuple[list[fx.Node], dict[str, Any]]:
    values = dict(pattern.example(Draw(variant, number)))
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in values.items() if name not in tensors}
    if set(tensors) != set(variant):
        raise PatternError(
            f"pattern {pattern.name!r}: its variants name {sorted(variant)}, its example makes {sorted(tensors)}",
            hint="name the same tensors",
        )
    traced = torch_compat.trace_example(lambda *given: pattern.search(**dict(zip(tensors, given, strict=True)), **constants), tensors)
    return list(traced.graph.nodes), constants


def _check(pattern: Pattern, outputs: tuple[Term, ...], unused: list[str], unread: list[str]) -> None:
    if unread:
        raise PatternError(f"pattern {pattern.name!r} never reads its tensor {unread[0]!r}", hint="leave the argument out")
    if unused:
        raise PatternError(
            f"pattern {pattern.name!r}: the constant {unused[0]!r} is found nowhere in its operations, or only as part of another number",
            hint="use it as it is, and draw another value for each example",
        )
    if any(term.target is None for term in outputs):
        raise PatternError(f"pattern {pattern.name!r} returns one of its arguments", hint="return results of operations")


def _size_error(pattern: Pattern, left: Any, right: Any) -> PatternError:
    return PatternError(
        f"pattern {pattern.name!r}: one of its operations has {left!r} in one example and {right!r} in another, which is no constant of it",
        hint="make the number an argument of the pattern, or avoid operations that take sizes",
    )


def _flat(value: Any) -> tuple[Term, ...]:
    return value if isinstance(value, tuple) else (value,)


def draws(pattern: Pattern, variant: Variant, count: int = 3) -> list[Mapping[str, Any]]:
    """Arguments to run a pattern with."""
    return [pattern.example(Draw(variant, number)) for number in range(count)]
