"""What the calls of a function on real data say of it as a region: its arguments, and the sizes of what it returns."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rung.compile.regions import OutputSpec, Region

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Call:
    """One call in a run on real data."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    written: tuple[int, ...]
    result: Any


class NoRegion(Exception):  # noqa: N818 - a signal between two functions, not an error
    """Why the calls of a target cannot be a region, as the end of a sentence that begins with its name."""


def region_of(holder: str, name: str, function: Callable[..., Any], runs: Sequence[Sequence[Call]], reason: str) -> Region:
    """What the calls of `function` in several runs have in common; it lies under `name` in `holder`. Raises `NoRegion` where they differ,
    or are not calls of tensors with tensors."""
    if len({len(run) for run in runs}) != 1:
        raise NoRegion("is called more or less often for another size")
    found = [Region(holder, name, *_described(calls), (), _place(function), reason) for calls in zip(*runs, strict=True)]
    written = tuple(sorted({number for run in runs for call in run for number in call.written}))
    if any(other != found[0] for other in found):
        raise NoRegion("is called in several ways: with other constants, or with results of other sizes")
    return replace(found[0], written=written)


def _described(calls: Sequence[Call]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[OutputSpec, ...], str]:
    """Arguments, outputs and kind of result of one call, seen at several sizes."""
    shapes = [_arguments(call) for call in calls]
    results = [_results(call.result) for call in calls]
    if not calls[0].tensors:
        raise NoRegion("takes no tensor")
    if any(shape != shapes[0] for shape in shapes[1:]):
        raise NoRegion("is called with other constants for another size")
    if len({(kind, len(tensors)) for kind, tensors in results}) != 1:
        raise NoRegion("returns another number of tensors for another size")
    kind, tensors = results[0]
    outputs = tuple(_output([values[1][index] for values in results], calls) for index in range(len(tensors)))
    return *shapes[0], outputs, kind


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__
    return f" at {base_name(code.co_filename)}:{code.co_firstlineno}"  # a plan holds no path


def _arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with tensors numbered in the order of `Call.tensors`. Raises `NoRegion` for something else than tensors and constants."""
    numbers = itertools.count()
    for value in (*call.args, *call.kwargs.values()):
        if not isinstance(value, (torch.Tensor, *_CONSTANTS)):
            raise NoRegion(f"takes a {type(value).__name__}; tensors, numbers, strings and None can be given")

    def form(value: Any) -> dict[str, Any]:
        return {"tensor": next(numbers)} if isinstance(value, torch.Tensor) else {"constant": value}

    return tuple(form(value) for value in call.args), {name: form(value) for name, value in call.kwargs.items()}


def _results(result: Any) -> tuple[str, list[torch.Tensor]]:
    if result is None:
        return "none", []
    if isinstance(result, torch.Tensor):
        return "tensor", [result]
    if type(result) in (tuple, list) and all(isinstance(item, torch.Tensor) for item in result):
        return type(result).__name__, list(result)
    raise NoRegion(f"returns a {type(result).__name__}; a tensor, a tuple or list of tensors, or None can be returned")


def _output(values: Sequence[torch.Tensor], calls: Sequence[Call]) -> OutputSpec:
    """An output's sizes: equal in all runs, or those of an argument in each of them. Raises `NoRegion` for others."""
    if len({(value.dtype, value.device, value.dim()) for value in values}) != 1:
        raise NoRegion("returns another dtype, device or rank for another size")
    shape: list[Any] = []
    for dim in range(values[0].dim()):
        sizes = [value.shape[dim] for value in values]
        inputs = [(i, j) for i, tensor in enumerate(calls[0].tensors) for j in range(tensor.dim())]
        match = next(([i, j] for i, j in inputs if [call.tensors[i].shape[j] for call in calls] == sizes), None)
        if len(set(sizes)) == 1:
            shape.append(sizes[0])
        elif match is None:
            raise NoRegion(f"returns a size that is none of its arguments' (dimension {dim}: {sizes})")
        else:
            shape.append(match)
    return OutputSpec(str(values[0].dtype), values[0].device.type, tuple(shape))


def base_name(filename: str) -> str:
    return filename.rpartition("/")[2]
