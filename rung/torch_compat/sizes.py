"""Traced sizes: their symbols, and the relations that a trace relies on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rung.torch_compat.capture import Capture
from rung.torch_compat.user_code import is_user_file, place


def resolved_symbol(shape_env: Any, size: Any) -> Any | None:
    """What a traced size stands for after all unifications: a sympy expression, or None for a plain int."""
    return shape_env.replace(size.node.expr) if isinstance(size, torch.SymInt) else None


def upper_bound(shape_env: Any, symbol: Any) -> int | None:
    """The largest size that the trace allows for a symbol, or None when it is free."""
    upper = shape_env.var_to_range[symbol].upper
    return int(upper) if upper.is_number and upper.is_finite and upper < 1 << 40 else None


def unproved_relations(capture: Capture, bounds: dict[Any, int | None]) -> list[tuple[Any, str]]:
    """Relations that the trace relies on and that do not hold for all sizes from 1 to the bounds, each with its place in user code.

    Size 0 is left out because an empty call runs eagerly. They are proved with the symbols' full ranges and without the trace's own
    assertions as axioms."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    env = capture.shape_env
    full = {symbol: ValueRanges(1, int_oo if bound is None else bound) for symbol, bound in bounds.items()}
    relations = [(item.expr, item.stack) for items in env.deferred_runtime_asserts.values() for item in items]
    relations += [(guard.expr, getattr(guard, "sloc", None)) for guard in env.guards]
    found = []
    for expression, stack in relations:
        replaced = env.replace(expression)
        ranges = {symbol: full.get(symbol) or env.var_to_range[symbol] for symbol in replaced.free_symbols}
        static = env._maybe_evaluate_static(replaced, axioms=(), var_to_range=tuple(ranges.items()))
        if static is None or not bool(static):
            found.append((replaced, _place(stack)))
    return found


def may_be_one(shape_env: Any, size: Any) -> bool:
    """Whether a traced size is 1 for some sizes of the dimensions, which begin at 1."""
    from sympy import Ne  # type: ignore[import-untyped]
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    expression = resolved_symbol(shape_env, size)
    if expression is None:
        return False
    ranges = tuple((symbol, ValueRanges(1, int_oo)) for symbol in expression.free_symbols)
    other = shape_env._maybe_evaluate_static(Ne(expression, 1), axioms=(), var_to_range=ranges)
    return other is None or not bool(other)


def bounding_constant(shape_env: Any, relation: Any, symbol: Any) -> int | None:
    """The largest constant of a relation such that the relation holds for all sizes up to it, e.g. 64 for Eq(s, Min(64, s))."""
    from torch.utils._sympy.value_ranges import ValueRanges

    constants = sorted({int(atom) for atom in relation.atoms() if atom.is_Integer and atom > 1}, reverse=True)
    for constant in constants:
        # up to the constant Min(constant, s) is s, which the range analysis does not see by itself
        reduced = relation.replace(lambda e: type(e).__name__ == "Min" and symbol in e.args, lambda _: symbol)
        static = shape_env._maybe_evaluate_static(reduced, axioms=(), var_to_range=((symbol, ValueRanges(1, constant)),))
        if static is not None and bool(static):
            return constant
    return None


def _place(stack: Any) -> str:
    """` at file:line (code)` of the innermost user frame of a captured traceback."""
    summary = getattr(stack, "summary", None)
    frames = summary() if callable(summary) else getattr(stack, "framework_loc", None) or ()
    for frame in reversed(list(frames) if not isinstance(frames, str) else []):
        if is_user_file(frame.filename) and frame.line:
            return place(frame.filename, frame.lineno, frame.line)
    return ""


def symbol_of(size: Any) -> Any | None:
    """The sympy expression of a SymInt, or None for a plain int."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a traced size or a number computed from one, or in the sizes and strides of a traced tensor."""
    if isinstance(value, torch.Tensor):
        return {symbol for extent in (*value.shape, *value.stride()) for symbol in free_symbols(extent)}
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else set()


def evaluate_size(value: Any, size: int) -> Any:
    """A traced size with every symbol set to `size`."""
    if not isinstance(value, torch.SymInt):
        return value
    return int(value.node.expr.subs(dict.fromkeys(value.node.expr.free_symbols, size)))


def sizes_of_symbols(traced: Any, value: Any) -> dict[Any, int]:
    """Symbols of a traced size, or of the shape of a traced tensor, and what they are in a real one."""
    pairs = zip(traced.shape, value.shape, strict=True) if isinstance(traced, torch.Tensor) else [(traced, value)]
    return {extent.node.expr: int(size) for extent, size in pairs if isinstance(extent, torch.SymInt) and extent.node.expr.is_symbol}


def known_size(value: Any, sizes: Mapping[Any, int]) -> int | None:
    """A traced size where its symbols have `sizes`; None where one of them is not there."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    size = value.node.expr.subs(sizes)
    return int(size) if size.is_number else None


def is_sym_int_node(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def is_surely_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor is contiguous for every size; the public question may need a size that is not there."""
    from torch._prims_common import is_contiguous_or_false

    return bool(is_contiguous_or_false(tensor))
