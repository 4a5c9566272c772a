"""The leaves of a call's arguments: tensors, whose layout is checked every call, and constants, whose values are."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rung.compile.paths import Access, Path
from rung.errors import InputMismatchError

Leaf = tuple[Path, Any]
Signature = tuple[Any, ...]


def leaves(locals_: Mapping[str, Any]) -> list[Leaf]:
    """Every tensor and constant among the bound arguments, in a fixed order; reaches into tuples, lists, dicts and dataclasses."""
    return [leaf for name, value in locals_.items() for leaf in _walk(name, (), value)]


def _walk(name: str, accesses: tuple[Access, ...], value: Any) -> Iterator[Leaf]:
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _walk(name, (*accesses, ("item", index)), item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(name, (*accesses, ("item", key)), item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(name, (*accesses, ("attr", field.name)), getattr(value, field.name))
    else:
        yield Path(name, accesses), value


def signature_of(found: list[Leaf], dims: Mapping[str, Mapping[int, str]]) -> Signature:
    """What must be equal for two calls to share a trace. Sizes of dynamic dimensions are not part of it."""
    return tuple((path, _leaf_signature(path, value, dims)) for path, value in found)


def _leaf_signature(path: Path, value: Any, dims: Mapping[str, Mapping[int, str]]) -> Any:
    if isinstance(value, torch.Tensor):
        named = dims.get(path.dotted(), {})
        shape = tuple(None if dim in named else extent for dim, extent in enumerate(value.shape))
        return ("tensor", value.dtype, value.device, shape)
    if isinstance(value, bool | int | float | str | type(None) | torch.dtype | torch.device):
        return (type(value), repr(value))  # repr: nan is equal to itself
    raise InputMismatchError(
        f"argument {path.dotted()!r} is a {type(value).__name__}, which a compiled function cannot check",
        hint="pass tensors, numbers, strings, None, or tuples, lists, dicts and dataclasses of them",
    )


def dynamic_dims(
    function: Callable[..., Any], found: list[Leaf], declared: Mapping[str, Mapping[int, str]] | None
) -> dict[str, dict[int, str]]:
    """The dynamic dimensions of a call: those declared, and dim 0 (under an own name) of every other argument annotated as a tensor."""
    result = {name: dict(dims) for name, dims in (declared or {}).items()}
    annotated = {name for name, parameter in inspect.signature(function).parameters.items() if "Tensor" in _annotation(parameter)}
    for path, value in found:
        name = path.dotted()
        unnamed = name not in result and (declared is None or name in annotated)
        if unnamed and isinstance(value, torch.Tensor) and value.dim() > 0 and not path.accesses:
            result[name] = {0: f"~{name}"}
    return result


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
