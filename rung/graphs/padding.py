"""The run that shows whether padded rows of a wrapped module reach its real rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rung.errors import InputMismatchError, PaddingError
from rung.graphs.buffers import BufferSpec

Run = Callable[[list[Any]], Sequence[Any]]  # inputs in order -> flat outputs

# Exact and padded sizes may take other kernels, so these runs are compared within rounding: (relative, absolute).
_TOLERANCE: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (3e-2, 1e-2),
}


def check_padding(
    run: Run,
    specs: Sequence[BufferSpec | None],
    inputs: Sequence[Any],
    sizes: Mapping[str, int],
    *,
    names: Sequence[str] = (),
    seed: int = 0,
) -> tuple[dict[int, str], ...]:
    """Run `run` on `inputs` exactly, and padded to `sizes` with the declared pad values and again with random ones; all must agree.

    `specs[i]` describes input i, None for an input without dynamic dimensions. `sizes` must be larger than the inputs in at least one named
    dimension. Returns for each output the names of its dynamic dimensions, which `Outputs.clone` cuts.
    Raises `PaddingError` naming the output and the first row that differs."""
    given = _actual_sizes(specs, inputs)
    _check_sizes(given, sizes)
    generator = torch.Generator().manual_seed(seed)
    exact = _snapshot(run(list(inputs)))
    declared = _snapshot(run(_padded(specs, inputs, sizes, None)))
    random = _snapshot(run(_padded(specs, inputs, sizes, generator)))
    dims: list[dict[int, str]] = []
    for index, (want, first, second) in enumerate(zip(exact, declared, random, strict=True)):
        name = names[index] if index < len(names) else f"output {index}"
        dims.append(_compare(name, want, first, second, given, sizes))
    return tuple(dims)


def _actual_sizes(specs: Sequence[BufferSpec | None], inputs: Sequence[Any]) -> dict[str, int]:
    """The size of every named dimension in `inputs`."""
    sizes: dict[str, int] = {}
    for spec, value in zip(specs, inputs, strict=True):
        if spec is None:
            continue
        for dim, name in enumerate(spec.shape):
            if isinstance(name, str) and sizes.setdefault(name, value.shape[dim]) != value.shape[dim]:
                raise InputMismatchError(
                    f"dimension {name!r} is {sizes[name]} in one input and {value.shape[dim]} in {spec.name!r}",
                    hint="give dimensions the same name only when they always have the same size",
                )
    return sizes


def _check_sizes(given: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    if any(sizes[name] < size for name, size in given.items()) or all(sizes[name] == size for name, size in given.items()):
        raise InputMismatchError(f"inputs of sizes {dict(given)} cannot be padded to {dict(sizes)}", hint="pad to larger sizes")


def _padded(
    specs: Sequence[BufferSpec | None], inputs: Sequence[Any], sizes: Mapping[str, int], generator: torch.Generator | None
) -> list[Any]:
    """Inputs at `sizes`, the padding filled with the declared value, or at random when a generator is given."""
    padded: list[Any] = []
    for spec, value in zip(specs, inputs, strict=True):
        if spec is None:
            padded.append(value)
            continue
        target = torch.full(spec.resolve(sizes), spec.pad, dtype=spec.dtype)
        if generator is not None and spec.dtype.is_floating_point:
            target = (torch.randn(target.shape, generator=generator) * 100).to(spec.dtype)
        elif generator is not None and spec.valid is not None:
            target = torch.randint(*spec.valid, target.shape, generator=generator, dtype=spec.dtype)
        target = target.to(value.device)
        target[tuple(slice(0, size) for size in value.shape)] = value
        padded.append(target)
    return padded


def _snapshot(outputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in outputs]


def _compare(name: str, exact: Any, declared: Any, random: Any, given: Mapping[str, int], sizes: Mapping[str, int]) -> dict[int, str]:
    """The dynamic dimensions of one output. Raises where real elements depend on the padding."""
    if not isinstance(exact, torch.Tensor):
        return {}
    pairs = list(zip(exact.shape, declared.shape, strict=False))
    names = {dim: _symbol(a, b, given, sizes) for dim, (a, b) in enumerate(pairs) if a != b}
    if exact.dim() != declared.dim() or None in names.values():
        raise PaddingError(
            f"{name} has shape {list(exact.shape)}, padded {list(declared.shape)}: padded rows cannot be cut off",
            hint="run this module at exact sizes (no pad=)",
        )
    real = tuple(slice(0, size) for size in exact.shape)
    _refuse_difference(name, declared[real], random[real], "under two different paddings")
    _refuse_difference(name, exact, declared[real], "between the exact size and the padded one")
    return {dim: symbol for dim, symbol in names.items() if symbol is not None}


def _symbol(exact: int, padded: int, given: Mapping[str, int], sizes: Mapping[str, int]) -> str | None:
    """The named dimension that has these two sizes."""
    return next((name for name, size in given.items() if (size, sizes[name]) == (exact, padded)), None)


def _refuse_difference(name: str, first: torch.Tensor, second: torch.Tensor, where: str) -> None:
    if first.dtype.is_floating_point:
        relative, absolute = _TOLERANCE.get(first.dtype, (0.1, 0.1))
        differs = ~torch.isclose(first.double(), second.double(), rtol=relative, atol=absolute, equal_nan=True)
    else:
        differs = first != second
    if not bool(differs.any()):
        return
    place = differs.nonzero()[0].tolist()
    row = f"row {place[0]}" if place else "its only value"
    values = f"{first[tuple(place)].item()} against {second[tuple(place)].item()}"
    raise PaddingError(
        f"rows mix under padding: {name} differs {where}, first in {row} ({values})",
        hint="an operation combines rows (mean, softmax over the rows, batch norm, a maximum over all); run at exact sizes (no pad=)",
    )
