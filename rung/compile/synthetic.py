"""Values that a piece is compared on: made up from its trace, so they may be none that the module can be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.compile.fake_kernels import CheckedInterpreter
from rung.launch.alignment import aligned_copy

INTEGERS = (
    0,
    1,
)  # what all integers of a run are: mostly they are indices, and 0 is one of everything; 1 is one behind `ids - 1`, and divides

_INDICES = (torch.int64, torch.int32)


def values_of(
    placeholders: Sequence[fx.Node], weights: Sequence[Any], size: int, generator: torch.Generator, integer: int = INTEGERS[0]
) -> list[Any]:
    """Inputs with every dynamic dimension at `size`. `weights` are the module's tensors among them, None elsewhere."""
    return [
        _sample(node.meta["example_value"], size, generator, integer) if weight is None else weight
        for node, weight in zip(placeholders, weights, strict=True)
    ]


def own(values: Sequence[Any], in_place: bool) -> list[Any]:
    """Inputs that a run may write: copies of everything when the piece writes at all, of the buffers always (batch norm counts in them)."""
    return [copy_of(value) if in_place or not isinstance(value, torch.nn.Parameter) else value for value in values]


def copy_of(value: Any) -> Any:
    """A copy of the same layout: `clone` makes views of a wider buffer dense, and pieces are compiled for exact strides."""
    return aligned_copy(value) if isinstance(value, torch.Tensor) else value


def _sample(value: Any, size: int, generator: torch.Generator, integer: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch_compat.evaluate_size(value, size)
    shape = [torch_compat.evaluate_size(extent, size) for extent in value.shape]
    stride = [torch_compat.evaluate_size(extent, size) for extent in value.stride()]
    result = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    # An expanded dimension is one element, and a copy into it is refused.
    single = [1 if step == 0 else extent for extent, step in zip(shape, stride, strict=True)]
    written = result.as_strided(single, stride) if result.numel() else result
    if value.dtype.is_floating_point:
        written.copy_(torch.randn(written.shape, generator=generator) * 0.5)
    else:
        written.fill_(integer)
    return result


class GraphRun(CheckedInterpreter):
    """Runs the graph of a piece. Indices beyond a tensor on a GPU raise here: a kernel that met them would end all work there."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("call_function", "call_method"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args):
                check_indices(str(getattr(n.target, "__name__", n.target)), args, kwargs)
        return super().run_node(n)


def check_indices(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `IndexError` where an operation of this name (embedding, index_select, gather, indexing) is given what is no index."""
    if name == "embedding" and len(args) > 1:  # of torch.nn.functional, or of ATen: there the table is first
        index, table = args[:2] if args[0].dtype in _INDICES else args[1::-1]
        _check(index, table.shape[0], least=0)
    elif name in ("index_select", "gather") and args[0].dim():
        dim, index = (*args[1:], *(kwargs[key] for key in ("dim", "index") if key in kwargs))[:2]
        _check(index, args[0].shape[dim], least=0)
    elif name in ("getitem", "setitem") and isinstance(args[0], torch.Tensor):
        dim = 0
        for index in args[1] if isinstance(args[1], tuple) else (args[1],):
            if index is Ellipsis:
                break
            boolean = isinstance(index, torch.Tensor) and index.dtype == torch.bool
            if isinstance(index, torch.Tensor) and not boolean:
                _check(index, args[0].shape[dim], least=-args[0].shape[dim])
            dim += index.dim() if boolean else 0 if index is None else 1


def _check(index: torch.Tensor, size: int, least: int) -> None:
    if index.numel() and not bool(((index >= least) & (index < size)).all()):
        raise IndexError(f"an index is not in {least} to {size - 1}")
