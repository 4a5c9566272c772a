"""Descriptions of what a guard compares: JSON that is equal, in any process, for objects which trace alike."""

from __future__ import annotations

import builtins
import enum
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch

from rung import torch_compat
from rung.compile.fingerprint import tensor_layout
from rung.compile.sources import code_digest

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.Size)


def describe(value: Any) -> Any:
    """[tag, text], or None when there is nothing to compare by value (an object that is only equal to itself)."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) or torch_compat.is_fake(value)
        return ["tensor", tensor_layout(value) if plain else f"{_qualified(type(value))} {tensor_layout(value)}"]
    if isinstance(value, enum.Enum):
        return ["enum", f"{type(value).__qualname__}.{value.name}"]
    if isinstance(value, (*_PLAIN, *_TORCH)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, torch.device):
        return ["device", value.type]
    if isinstance(value, type):
        return ["class", _qualified(value)]
    if isinstance(value, types.FunctionType):
        return ["function", f"{_qualified(value)} {code_digest(value.__code__)[:16]}"]
    if isinstance(value, staticmethod | classmethod | property):
        return _all(type(value).__name__, (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value.__func__,))
    if isinstance(value, types.CodeType):
        return ["code", code_digest(value)]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    return _described_callable(value) or _described_container(value)


def _described_callable(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return ["method", [describe(value.__func__), _qualified(type(value.__self__))]]
    if isinstance(value, functools.partial):
        return _all("partial", (value.func, *value.args, *value.keywords, *value.keywords.values()))
    if torch_compat.is_op(value):
        return ["op", str(value)]
    if callable(value) and getattr(value, "__qualname__", None):
        return ["callable", _qualified(value)]
    return None


def _described_container(value: Any) -> Any:
    if isinstance(value, slice):
        return _all("slice", (value.start, value.stop, value.step))
    if isinstance(value, tuple | list | range):
        return _all(type(value).__name__, value)
    if isinstance(value, set | frozenset):
        return _all(type(value).__name__, sorted(value, key=repr))
    if isinstance(value, Mapping):
        return _all(type(value).__name__, (*value, *value.values()))
    return None


def _all(tag: str, items: Any) -> Any:
    described = [describe(item) for item in items]
    return None if any(item is None for item in described) else [tag, described]


def belongs_to_torch(value: Any) -> bool:
    """Whether a module, a class or Python's own names belong to torch or to Python, whose versions are in every key."""
    if value is builtins.__dict__:
        return True
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ if isinstance(value, type) else ""
    return name.partition(".")[0] in ("torch", "builtins", "typing", "collections", "abc", "functools", "math", "operator", "itertools")


def _qualified(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}:{value.__qualname__}"
