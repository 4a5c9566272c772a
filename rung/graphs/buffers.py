"""Static input buffers: memory that keeps its address, seen at any size, with a declared pad value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from rung.errors import ConfigError, InputMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """One input: a dimension is a number, or the name of a dynamic dimension."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    pad: float = 0  # value of padded elements
    valid: tuple[int, int] | None = None  # half-open range of integers that are harmless here, for poison; None: only `pad` is

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape at the given sizes. Raises `ConfigError` when a named dimension has none."""
        missing = [dim for dim in self.shape if isinstance(dim, str) and dim not in sizes]
        if missing:
            raise ConfigError(
                f"input {self.name!r} has the dynamic dimension {missing[0]!r}, sizes are given for {sorted(sizes)}",
                hint="name every dynamic dimension of the inputs",
            )
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


class StaticBuffer:
    """Owns the memory of one input for as long as a graph reads it; the address never changes.

    `view(sizes)` is always contiguous and starts at the address of the buffer. `write` is for callers with a tensor of their own; a runner
    writes into views itself, padding included. Not thread-safe: the manager's lock covers it."""

    def __init__(self, spec: BufferSpec, *, capacity: Mapping[str, int], device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.capacity = dict(capacity)
        shape = spec.resolve(capacity)
        with torch.inference_mode(False):  # else no other mode could write it
            self._flat = torch.full((prod(shape),), spec.pad, dtype=spec.dtype, device=device)  # [elements at capacity]

    @property
    def storage(self) -> torch.Tensor:
        """All of the buffer, flat: [elements at capacity]."""
        return self._flat

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def view(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """The buffer at the given sizes. Raises `InputMismatchError` beyond the capacity."""
        shape = self.spec.resolve(sizes)
        for dim in self.spec.shape:
            if isinstance(dim, str) and sizes[dim] > self.capacity[dim]:
                raise InputMismatchError(
                    f"input {self.name!r}: size {sizes[dim]} of dimension {dim!r} is above the capacity {self.capacity[dim]}",
                    hint="give the buffer a larger capacity, or run this step without static buffers",
                )
        return self._flat[: prod(shape)].view(shape)

    def write(self, tensor: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """Copy `tensor` to the front of the view at `sizes`, fill the rest with the pad value, return the view."""
        target = self.view(sizes)
        if (
            tensor.dtype != target.dtype
            or tensor.dim() != target.dim()
            or any(a > b for a, b in zip(tensor.shape, target.shape, strict=True))
        ):
            raise InputMismatchError(
                f"input {self.name!r}: expected {target.dtype} of at most {list(target.shape)}, came {tensor.dtype} {list(tensor.shape)}",
                hint="the dynamic dimensions may be smaller than the captured size, all others must be equal",
            )
        fixed = [i for i, dim in enumerate(self.spec.shape) if not isinstance(dim, str) and tensor.shape[i] != dim]
        if fixed:
            raise InputMismatchError(
                f"input {self.name!r}: dimension {fixed[0]} is {tensor.shape[fixed[0]]}, it is fixed at {target.shape[fixed[0]]}"
            )
        target[tuple(slice(0, size) for size in tensor.shape)].copy_(tensor, non_blocking=True)
        self._fill_outside(target, tuple(tensor.shape), self.spec.pad)
        return target

    def poison(self, generator: torch.Generator | None = None) -> None:
        """Fill everything with what must not matter: NaN, random valid integers, or the pad value where no valid range is declared."""
        if self.spec.dtype.is_floating_point:
            self._flat.fill_(float("nan"))
        elif self.spec.valid is None:
            self._flat.fill_(self.spec.pad)
        else:
            self._flat.random_(*self.spec.valid, generator=generator)

    @staticmethod
    def _fill_outside(target: torch.Tensor, inner: tuple[int, ...], value: float) -> None:
        for dim, size in enumerate(inner):  # dims before `dim` are cut to their inner part, so every element is filled once
            if size < target.shape[dim]:
                target[(*(slice(0, s) for s in inner[:dim]), slice(size, None))].fill_(value)


@contextmanager
def kept(buffers: Sequence[StaticBuffer]) -> Iterator[None]:
    """What the buffers hold is put back at the end."""
    saved = [buffer.storage.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in zip(buffers, saved, strict=True):
            buffer.storage.copy_(values)
