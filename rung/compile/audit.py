"""Check what a trace decided about the dynamic dimensions: they must still be free, and every relation must hold for all sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.compile.paths import Path
from rung.errors import DynamicShapeError, TraceError


class FixedDimension(Exception):  # noqa: N818 - a signal between two functions, not an error
    """A dimension that nobody declared, and that the trace fixed."""

    def __init__(self, argument: str, dim: int) -> None:
        super().__init__(argument, dim)
        self.argument = argument
        self.dim = dim


def audit_symbols(
    capture: torch_compat.Capture, inputs: tuple[Path, ...], dynamic: Mapping[str, Mapping[int, str]], maximum: int | None, name: str
) -> tuple[dict[str, str], dict[str, int | None], dict[str, str]]:
    """Symbols of the trace -> names; names -> the largest size the graph serves (None: any); names -> the name they were unified with.

    An upper bound (a buffer narrowed to the argument's size) is accepted, because the entry checks it. Any other relation that does not
    hold for all sizes, and a fixed dimension, raise `DynamicShapeError` with argument, relation and place. A fixed dimension whose name
    begins with "~" was not asked for and raises `FixedDimension` instead, so that it can be traced as static."""
    placeholders = [node for node in capture.graph_module.graph.nodes if node.op == "placeholder"]
    symbols: dict[str, str] = {}
    unified: dict[str, str] = {}
    bounds: dict[Any, int | None] = {}
    for path, node in zip(inputs, placeholders, strict=True):
        dims = dynamic.get(path.dotted(), {}) if path.dim is None else {}
        for dim, user_name in dims.items():
            expression = _free_symbol(capture, node, name, path.dotted(), dim, user_name)
            unified[user_name] = symbols.setdefault(str(expression), user_name)
            limits = [bound for bound in (torch_compat.upper_bound(capture.shape_env, expression), maximum) if bound is not None]
            bounds[expression] = min(limits, default=None)
    places = _undeclared(capture, inputs, dynamic)
    for relation, place in torch_compat.unproved_relations(capture, bounds):
        free = list(relation.free_symbols)
        bound = torch_compat.bounding_constant(capture.shape_env, relation, free[0]) if len(free) == 1 and free[0] in bounds else None
        undeclared = [places[str(symbol)] for symbol in free if str(symbol) in places]
        if bound is None and undeclared:
            raise FixedDimension(*undeclared[0])
        if bound is None:
            raise DynamicShapeError(
                f"{name} only works for sizes with {_readable(relation, symbols)}{place}",
                hint="a compiled graph serves every size: remove the relation, or leave the dimension out of `dynamic`",
            )
        bounds[free[0]] = min(bound, bounds[free[0]] or bound)
    limits_of_names = {symbols[str(symbol)]: bound for symbol, bound in bounds.items()}
    read = {path.dotted() if path.dim is None else Path(path.local, path.accesses).dotted() for path in inputs}
    for argument in dynamic.keys() - read:  # nothing is known of a tensor that the graph does not read, so any size will do
        for user_name in dynamic[argument].values():
            limits_of_names.setdefault(unified.setdefault(user_name, user_name), maximum)
    return symbols, limits_of_names, unified


def _undeclared(
    capture: torch_compat.Capture, inputs: tuple[Path, ...], dynamic: Mapping[str, Mapping[int, str]]
) -> dict[str, tuple[str, int]]:
    """Symbol of a dimension that nobody declared -> its argument and number."""
    return {
        str(symbol): (path.dotted(), dim)
        for path, node in zip(inputs, capture.graph_module.graph.find_nodes(op="placeholder"), strict=True)
        for dim, name in (dynamic.get(path.dotted(), {}) if path.dim is None else {}).items()
        if name.startswith("~")
        for symbol in torch_compat.free_symbols(node.meta["example_value"].shape[dim])
    }


def refuse_lost_dimensions(
    capture: torch_compat.Capture,
    inputs: tuple[Path, ...],
    dynamic: Mapping[str, Mapping[int, str]],
    symbols: Mapping[str, str],
    name: str,
) -> None:
    """Raise `DynamicShapeError` for the first dimension that is taken away at size 1 and stays at others: a trace leaves it there. One that
    nobody declared raises `FixedDimension`."""
    places = _undeclared(capture, inputs, dynamic)
    for node in capture.graph_module.graph.nodes:
        for dim, size in squeezed_dims(node):
            if not torch_compat.may_be_one(capture.shape_env, size):
                continue
            undeclared = [places[str(symbol)] for symbol in torch_compat.free_symbols(size) if str(symbol) in places]
            if undeclared:
                raise FixedDimension(*undeclared[0])
            raise DynamicShapeError(
                f"{name} takes dimension {dim} away where its size, {_readable(torch_compat.symbol_of(size), symbols)}, is 1"
                f"{torch_compat.node_location(node)}",
                hint="a compiled graph has the same dimensions for every size: name those of fixed size (`squeeze(-1)`), or leave the "
                "dimension out of `dynamic`",
            )


def squeezed_dims(node: fx.Node) -> list[tuple[int, Any]]:
    """The dimensions that a node takes away if their sizes are 1, each with its size. Other ops whose result has more or fewer dimensions
    for some sizes (`torch.cov`) ask for the size, which no trace can answer."""
    called = str(node.target) if node.op == "call_method" else torch_compat.torch_name(node.target) if node.op == "call_function" else ""
    if called not in ("squeeze", "squeeze_", "squeeze_copy"):
        return []
    given = node.all_input_nodes[0].meta["example_value"].shape
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
    named = range(len(given)) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
    return [(int(dim) % len(given), given[int(dim)]) for dim in named if given]


def refuse_sizes_of_values(capture: torch_compat.Capture, name: str) -> None:
    """Raise `TraceError` for the first tensor whose size is known only from the values of another, such as `x[x > 0]`."""
    known: set[Any] = set()
    for node in capture.graph_module.graph.nodes:
        values = node.meta.get("example_value")
        found = {
            symbol for value in (values if isinstance(values, tuple | list) else (values,)) for symbol in torch_compat.free_symbols(value)
        }
        if node.op == "placeholder":
            known |= found
        elif not found <= known and any(
            isinstance(value, torch.Tensor) for value in (values, *(values if isinstance(values, tuple) else ()))
        ):
            raise TraceError(
                f"{name} makes a tensor whose size depends on values{torch_compat.node_location(node)}",
                hint="use torch.where or a mask of fixed size, or rung.eager_break on a function whose result has a fixed size",
            )


def refuse_values_on_the_host(capture: torch_compat.Capture, name: str) -> None:
    """Raise `TraceError` for the first number that is read from a tensor and used, as in `x * x.sum().item()`. Its cause is the stack."""
    known: set[Any] = set()
    for node in capture.graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            known |= set(torch_compat.free_symbols(value))
            continue
        number = node.users and isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        if number and not set(torch_compat.free_symbols(value)) <= known:
            raise TraceError(
                f"{name} could not be traced as one graph{torch_compat.node_location(node)}: it reads a value of a tensor on the host",
                hint="keep it a tensor (`x.sum()` without `.item()`), or move it into a function of its own that is a rung.eager_break "
                '(breaks="auto" makes it one)',
            ) from RuntimeError(node.stack_trace)


def _free_symbol(capture: torch_compat.Capture, placeholder: fx.Node, name: str, argument: str, dim: int, user_name: str) -> Any:
    """The symbol that a dynamic dimension has after the trace."""
    size = placeholder.meta["example_value"].shape[dim]
    expression = torch_compat.resolved_symbol(capture.shape_env, size)
    if expression is not None and expression.is_symbol:
        return expression
    if user_name.startswith("~"):
        raise FixedDimension(argument, dim)
    if expression is None or expression.is_number:
        fixed = int(expression) if expression is not None else size
        raise DynamicShapeError(
            f"{name} fixes dimension {dim} ({user_name!r}) of argument {argument!r} to {fixed}"
            + torch_compat.where_fixed(capture, placeholder, fixed),
            hint="narrow buffers to the size of the argument before they meet it, or leave the dimension out of `dynamic`",
        )
    raise DynamicShapeError(
        f"{name} makes dimension {dim} ({user_name!r}) of argument {argument!r} equal to {expression}",
        hint="name dimensions equally that are always equal",
    )


def _readable(relation: Any, symbols: Mapping[str, str]) -> str:
    text = str(relation)
    for symbol, user_name in symbols.items():
        text = text.replace(symbol, user_name)
    return text
