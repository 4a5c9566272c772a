"""One call of an ATen op, with its arguments by the names of the schema and what is known about their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rung import torch_compat
from rung.compile.rows.state import Axis, Extent, State, mixes, ratio, unknown

StateOf = Callable[[torch.Tensor], State]


class Call:
    """The view that a rule has of a call. `rows` is the symbol of the dimension, at most `bound`; `result` is what the op returned."""

    def __init__(
        self,
        op: torch_compat.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        rows: Any,
        bound: int | None,
        state_of: StateOf,
    ) -> None:
        self.op = op
        self.rows = rows
        self.bound = bound
        self.result = result
        self.state = state_of
        schema = op._schema.arguments
        self.arguments: dict[str, Any] = {
            argument.name: args[index]
            if index < len(args)
            else kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None)
            for index, argument in enumerate(schema)
        }
        self.scalars = [self.arguments[argument.name] for argument in schema if "int" not in str(argument.type).lower()]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor argument, those in lists too."""
        return (leaf for leaf in torch_compat.tree_leaves(tuple(self.arguments.values())) if isinstance(leaf, torch.Tensor))

    def axis_of(self, tensor: Any) -> Axis | None:
        state = self.state(tensor) if isinstance(tensor, torch.Tensor) else None
        return state if isinstance(state, Axis) else None

    def axis(self, name: str) -> Axis | None:
        return self.axis_of(self.arguments[name])

    def only(self, *names: str) -> Axis:
        """The rows of the first named argument that has any; all arguments with rows must be among the named ones, and agree."""
        allowed = [tensor for name in names for tensor in torch_compat.tree_leaves(self.arguments.get(name)) if tensor is not None]
        found: Axis | None = None
        for tensor in self.tensors():
            axis = self.axis_of(tensor)
            if axis is None:
                continue
            if not any(tensor is other for other in allowed):
                raise unknown("rows reach an argument that is taken to be the same for all rows")
            if found is not None and axis != found:
                raise mixes("two arguments hold rows in different dimensions, so that rows meet other rows")
            found = found or axis
        if found is None:
            raise unknown("it makes rows out of arguments without rows")
        return found

    def shape(self, tensor: torch.Tensor) -> list[Extent]:
        return [self.size(extent) for extent in tensor.shape]

    def outputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in torch_compat.tree_leaves(self.result) if isinstance(leaf, torch.Tensor)]

    def mentions(self, value: Any) -> bool:
        """Whether a size, or a tensor's shape, depends on the number of rows."""
        if isinstance(value, torch.Tensor):
            return any(self.mentions(extent) for extent in value.shape)
        return self.rows in torch_compat.free_symbols(value)

    def positional(self) -> Axis | None:
        """Rows of a result whose elements depend on their position alone."""
        (output,) = self.outputs()
        dims = [dim for dim, extent in enumerate(output.shape) if self.mentions(extent)]
        if not dims:
            return None
        inner = ratio(self.size(output.shape[dims[0]]), self.rows)
        if len(dims) > 1 or inner is None or self.mentions_extent(inner):
            raise unknown(f"its shape {list(output.shape)} does not count rows in one dimension")
        return Axis(dims[0], 1, inner)

    def mentions_extent(self, extent: Extent) -> bool:
        return self.rows in getattr(extent, "free_symbols", ())

    def size(self, extent: Any) -> Extent:
        """An int as it is, the expression of a symbolic size. Min(64, rows) is the number of rows when there are never more than 64."""
        if isinstance(extent, int):
            return extent
        expression: Any = torch_compat.symbol_of(extent)
        if self.bound is None or not self.mentions_extent(expression):
            return expression
        limits = {self.rows, *(atom for atom in expression.atoms() if atom.is_Integer and atom >= self.bound)}
        return expression.replace(
            lambda e: type(e).__name__ == "Min" and self.rows in e.args and limits.issuperset(e.args), lambda _: self.rows
        )


def dims_of(value: Any, rank: int) -> set[int]:
    """Dimensions given as a number, a list or nothing (all of them), counted from 0."""
    if value is None or value == []:
        return set(range(rank))
    return {dim % max(rank, 1) for dim in (value if isinstance(value, list | tuple) else [value])}
