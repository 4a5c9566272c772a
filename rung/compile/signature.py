"""The parameters of a function as its own code has them, and the names by which its callers know them.

A decorator's wrapper often takes `*args, **kwargs`: a trace then reads `args[1]` or `kwargs['x']` where a caller says `x`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rung.compile.paths import Path

_SELF = "self"  # of a method whose code takes its object in `*args`


def own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of the code that runs, the object of a bound method left out."""
    return inspect.signature(function, follow_wrapped=False)


def self_name(function: Callable[..., Any]) -> str:
    """The name under which plans know the object of the bound method `function`."""
    return _SELF if variadic_self(function) else next(iter(own_signature(function.__func__).parameters))  # type: ignore[attr-defined]


def argument_path(path: Path, function: Callable[..., Any]) -> Path:
    """The place among the bound arguments (and the object under `self_name`) of a place among the locals of the code."""
    return shifted_path(path, variadic_self(function))


def shifted_path(path: Path, variadic: str) -> Path:
    """`argument_path` for a function with this `variadic_self`."""
    if not variadic or path.local != variadic or not path.accesses:
        return path
    (kind, index), *rest = path.accesses
    if index == 0:
        return Path(_SELF, tuple(rest), path.dim)
    return Path(variadic, ((kind, index - 1), *rest), path.dim)


def shown_parameters(function: Callable[..., Any]) -> dict[str, tuple[inspect.Parameter, tuple[str, ...]]]:
    """The parameters that callers know, and for each the places (as `Path.dotted`) where its value may lie."""
    own = own_signature(function).parameters
    shown = inspect.signature(function).parameters
    positional = next((name for name, one in own.items() if one.kind is one.VAR_POSITIONAL), None)
    keywords = next((name for name, one in own.items() if one.kind is one.VAR_KEYWORD), None)
    first = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in own.values())
    result = {}
    for index, (name, parameter) in enumerate(shown.items()):
        places = [name] if name in own else []
        if name not in own and positional is not None:
            places.append(f"{positional}.{index - first}")
        if name not in own and keywords is not None:
            places.append(f"{keywords}.{name}")
        result[name] = (parameter, tuple(places))
    return result


def variadic_self(function: Callable[..., Any]) -> str:
    """The name of `*args` where it holds the object of a bound method, else an empty text."""
    plain = getattr(function, "__func__", None)
    first = None if plain is None else next(iter(own_signature(plain).parameters.values()), None)
    return first.name if first is not None and first.kind is first.VAR_POSITIONAL else ""
