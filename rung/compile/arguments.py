"""The leaves of a call's arguments: tensors, whose layout is checked every call, constants, whose values are, and containers, whose
types and keys are: a trace unrolls what it iterates over."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rung.compile.paths import Access, Path
from rung.compile.signature import shown_parameters
from rung.errors import InputMismatchError

Leaf = tuple[Path, Any]
Signature = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """A tuple, list, mapping or dataclass among the arguments."""

    type: type
    keys: tuple[Any, ...] | int | None  # of a mapping, in order; the length of a sequence; None: the type tells

    def __repr__(self) -> str:
        return f"{self.type.__module__}:{self.type.__qualname__} {self.keys!r}"


def leaves(locals_: Mapping[str, Any]) -> list[Leaf]:
    """Every tensor, constant and container among the bound arguments, in a fixed order; reaches into tuples, lists, dicts and dataclasses.
    A container comes before what it holds."""
    return [leaf for name, value in locals_.items() for leaf in _walk(name, (), value)]


def _walk(name: str, accesses: tuple[Access, ...], value: Any) -> Iterator[Leaf]:
    if isinstance(value, tuple | list):
        yield Path(name, accesses), Container(type(value), len(value))
        for index, item in enumerate(value):
            yield from _walk(name, (*accesses, ("item", index)), item)
    elif isinstance(value, Mapping):
        yield Path(name, accesses), Container(type(value), tuple(value))
        for key, item in value.items():
            yield from _walk(name, (*accesses, ("item", key)), item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield Path(name, accesses), Container(type(value), None)
        for field in dataclasses.fields(value):
            yield from _walk(name, (*accesses, ("attr", field.name)), getattr(value, field.name))
    else:
        yield Path(name, accesses), value


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory with sizes and strides alone: not sparse, quantized, nested, or in the layout of another library."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def signature_of(found: list[Leaf], dims: Mapping[str, Mapping[int, str]]) -> Signature:
    """What must be equal for two calls to share a trace. Sizes of dynamic dimensions are not part of it."""
    return tuple((path, _leaf_signature(path, value, dims)) for path, value in found)


def _leaf_signature(path: Path, value: Any, dims: Mapping[str, Mapping[int, str]]) -> Any:
    if isinstance(value, torch.Tensor):
        named = dims.get(path.dotted(), {})
        shape = tuple(None if dim in named else extent for dim, extent in enumerate(value.shape))
        return ("tensor", value.dtype, value.device, shape)
    if isinstance(value, Container):
        return value
    if isinstance(value, bool | int | float | str | type(None) | torch.dtype | torch.device):
        return (type(value), repr(value))  # repr: nan is equal to itself
    raise InputMismatchError(
        f"argument {path.dotted()!r} is a {type(value).__name__}, which a compiled function cannot check",
        hint="pass tensors, numbers, strings, None, or tuples, lists, dicts and dataclasses of them",
    )


def replace_tensors(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor that `leaves` would find replaced; containers are copied, never changed."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, tuple):
        items = [replace_tensors(item, replace) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, list | Mapping):
        result: Any = copy.copy(value)
        for key in range(len(value)) if isinstance(value, list) else list(value):
            result[key] = replace_tensors(value[key], replace)
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, replace_tensors(getattr(value, field.name), replace))
        return result
    return value


def dynamic_dims(
    function: Callable[..., Any], found: list[Leaf], declared: Mapping[str, Mapping[int, str]] | None
) -> dict[str, dict[int, str]]:
    """The dynamic dimensions of a call by dotted path: those declared, and dim 0 (under an own name) of every other argument annotated as
    a tensor."""
    tensors = {path.dotted(): value for path, value in found if isinstance(value, torch.Tensor)}
    shown = shown_parameters(function)
    result: dict[str, dict[int, str]] = {}
    for name, dims in (declared or {}).items():
        places = shown[name][1] if name in shown else (name,)
        # a parameter that a wrapper passes on is absent in some calls; its other names are for a message
        for place in [place for place in places if place in tensors] or [place for place in places if place == name]:
            result[place] = dict(dims)
    for name, (parameter, places) in shown.items():
        for place in places:
            unnamed = place in tensors and place not in result and (declared is None or "Tensor" in _annotation(parameter))
            if unnamed and tensors[place].dim() > 0:
                result[place] = {0: f"~{name}"}
    return result


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
