"""The identity of code that may change a graph: its source and the values it is bound to."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from rung.errors import PassError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def code_identity(*functions: Callable[..., Any]) -> str:
    """A text that changes with the source of the modules that hold `functions`, with their names, defaults and what they close over.

    Raises `PassError` where there is no source, or where a value has no text of its own that could stand in a key."""
    return "\0".join(_identity(function) for function in functions)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def value_identity(value: Any, owner: str) -> str:
    """The text of a parameter. Functions count with their source."""
    if inspect.isfunction(value) or isinstance(value, functools.partial):
        return _identity(value)
    text = repr(value)
    if _ADDRESS.search(text):
        raise PassError(
            f"{owner} holds a {type(value).__name__}, whose text {text!r} differs between processes",
            hint="give it numbers, strings, dtypes or tuples of them, or give its class a __repr__ that shows its values",
        )
    return text


def _identity(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        bound = [value_identity(value, "a partial") for value in (*function.args, *sorted(function.keywords.items()))]
        return "\0".join((_identity(function.func), *bound))
    plain: Any = inspect.unwrap(getattr(function, "__func__", function))
    name = getattr(plain, "__qualname__", repr(plain))
    cells = [cell.cell_contents for cell in getattr(plain, "__closure__", None) or ()]
    defaults = [*(getattr(plain, "__defaults__", None) or ()), *sorted((getattr(plain, "__kwdefaults__", None) or {}).items())]
    return "\0".join((name, _source(plain, name), *(value_identity(value, name) for value in (*defaults, *cells))))


def _source(function: Any, name: str) -> str:
    module = sys.modules.get(getattr(function, "__module__", ""))
    for item in (module, function):
        try:
            if item is not None:
                return inspect.getsource(item)
        except (OSError, TypeError):
            continue
    raise PassError(f"the source of {name} cannot be found, so no key can cover it", hint="define it in a file")
