"""What a replay hands out: tensors that the next replay overwrites, so every way to read them says how long it may last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rung.errors import InputMismatchError, StaleOutputError
from rung.torch_compat import tree_leaves

OutputDims = Sequence[Mapping[int, str]]  # for each output the names of its dynamic dimensions
Sizes = int | Mapping[str, int]  # the rows of a single dynamic dimension, or the size of each by name


class Outputs:
    """The flat outputs of one step. The manager owns the memory until the next step of the same manager.

    `borrow()` gives the captured tensors themselves and raises `StaleOutputError` once a later step overwrote them; what was taken before
    cannot be taken back, so a borrower drops its tensors before it runs the next step. `clone()` and `into()` copy."""

    __slots__ = ("_current", "_flat", "_generation")

    def __init__(self, flat: Sequence[Any], generation: int, current: Callable[[], int] | None) -> None:
        self._flat = flat
        self._generation = generation
        self._current = current  # None: the step ran without a graph, its outputs are nobody else's

    @property
    def is_stale(self) -> bool:
        return self._current is not None and self._current() != self._generation

    def borrow(self) -> list[Any]:
        """The flat outputs (tensors and ints), not copied."""
        if self.is_stale:
            raise StaleOutputError(
                f"these outputs belong to step {self._generation}, a later step has overwritten them",
                hint="read them before the next step, or take them with clone() or into()",
            )
        return list(self._flat)

    def clone(self, sizes: Sizes | None = None, dims: OutputDims | None = None) -> list[Any]:
        """Copies that are the caller's, cut to `sizes` when given. Outputs that share memory get copies that do not."""
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in self.cut(sizes, dims)]

    def into(self, targets: Sequence[torch.Tensor | None], sizes: Sizes | None = None, dims: OutputDims | None = None) -> None:
        """Copy into the caller's tensors, in order; None skips an output."""
        copy_into(targets, self.cut(sizes, dims))

    def cut(self, sizes: Sizes | None, dims: OutputDims | None = None) -> list[Any]:
        """Borrowed outputs without their padding. Without `dims` dimension 0 of every tensor counts rows."""
        flat = self.borrow()
        if sizes is None:
            return flat
        if dims is None:
            dims = [{0: ""} if isinstance(value, torch.Tensor) and value.dim() else {} for value in flat]
        return [cut_output(value, names, sizes) for value, names in zip(flat, dims, strict=True)]


def output_tensors(result: Any) -> list[Any]:
    """The tensors of a module's result, in the order of its structure."""
    return [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]


def copy_into(targets: Sequence[torch.Tensor | None], values: Sequence[Any]) -> None:
    """Copy each value into its target; None skips one. All are checked before anything is written."""
    if len(targets) != len(values):
        raise InputMismatchError(f"{len(targets)} targets were given for {len(values)} outputs", hint="give one target, or None, an output")
    for index, (target, value) in enumerate(zip(targets, values, strict=True)):
        if target is not None and (not isinstance(value, torch.Tensor) or (target.shape, target.dtype) != (value.shape, value.dtype)):
            raise InputMismatchError(
                f"target {index} is {describe(target)}, the output is {describe(value)}", hint="give targets like the outputs"
            )
    for target, value in zip(targets, values, strict=True):
        if target is not None:
            target.copy_(value)


def describe(value: Any) -> str:
    """A value in an error message."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def cut_output(value: Any, names: Mapping[int, str], sizes: Sizes) -> Any:
    """An output without its padding; `names` are those of its dynamic dimensions."""
    for dim, name in names.items():
        size = sizes if isinstance(sizes, int) else sizes[name]
        value = value.narrow(dim, 0, min(size, value.shape[dim]))
    return value
