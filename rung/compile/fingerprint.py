"""What of a module could have steered its trace: classes, configuration values and the layout of its tensors.

A deliberate over-approximation: every plain attribute counts, read or not. A module class may exclude attributes that its forward does not
read by naming them in `rung_unread_attributes`.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rung.compile.hooks import FORWARD, OTHERS
from rung.compile.sources import code_digest

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
# Called when a state is saved or loaded, never by a forward.
_STATE_HOOKS = frozenset({"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.layout)


class RuntimeState:
    """Base of what rung itself hangs on a module; it never steers a trace."""


def fingerprint(module: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """JSON that is equal for modules which trace alike, and the attributes that could not be described (the plan then cannot be kept)."""
    walk = _Walk()
    modules = {name: walk.module(name, submodule) for name, submodule in module.named_modules()}
    return {"modules": modules, "tied": _tied(module)}, walk.opaque


def _class_attributes(cls: type) -> dict[str, str]:
    """Plain values that classes of the user hold; those of torch are covered by its version."""
    classes = [base for base in reversed(cls.__mro__) if not base.__module__.startswith(("torch.", "builtins"))]
    found = {key: value for base in classes for key, value in vars(base).items() if isinstance(value, _PLAIN)}
    return {key: repr(value) for key, value in sorted(found.items()) if not key.startswith("__")}


def _tied(module: nn.Module) -> list[list[str]]:
    """Names of one tensor under several names: a trace reads it as one input."""
    names: dict[int, list[str]] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        for key, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{name}.{key}")
    return sorted(found for found in names.values() if len(found) > 1)


def tensor_layout(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_nested:  # neither has strides
        return f"{tensor.dtype} {tensor.layout} {'nested' if tensor.is_nested else tuple(tensor.shape)} {tensor.device.type}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.device.type}"


class _Walk:
    def __init__(self) -> None:
        self.opaque: list[str] = []
        self.seen: set[int] = set()

    def module(self, name: str, module: nn.Module) -> dict[str, Any]:
        skipped = {*_TABLES, *_STATE_HOOKS, *getattr(module, "rung_unread_attributes", ())}
        plain = {key: value for key, value in module.__dict__.items() if key not in skipped and not isinstance(value, RuntimeState)}
        tensors = {**module._parameters, **module._buffers}
        return {
            "class": f"{type(module).__module__}:{type(module).__qualname__}",
            "class_attributes": _class_attributes(type(module)),
            "tensors": {key: tensor_layout(tensor) for key, tensor in tensors.items() if tensor is not None},
            "attributes": {key: self.value(f"{name}.{key}", value) for key, value in sorted(plain.items())},
        }

    def value(self, where: str, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, torch.device):
            return f"device:{value.type}"
        if isinstance(value, torch.Tensor):
            return tensor_layout(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, nn.Module):
            return f"module {type(value).__module__}:{type(value).__qualname__}"
        if isinstance(value, types.FunctionType):
            return f"{value.__module__}:{value.__qualname__}:{code_digest(value.__code__)}"
        if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
            return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', value.__name__)}"
        if isinstance(value, types.MethodType):
            return [self.value(where, value.__func__), type(value.__self__).__qualname__]
        if isinstance(value, functools.partial):
            return [self.value(where, item) for item in (value.func, value.args, value.keywords)]
        return self._compound(where, value)

    def _compound(self, where: str, value: Any) -> Any:
        if id(value) in self.seen:
            return "seen"
        self.seen.add(id(value))
        try:
            if isinstance(value, Mapping):
                items = value.values() if where.rpartition(".")[2] in (*FORWARD, *OTHERS) else ((str(k), v) for k, v in value.items())
                return [self.value(where, item) for item in items]
            if isinstance(value, tuple | list):
                return [self.value(f"{where}[{i}]", item) for i, item in enumerate(value)]
            if isinstance(value, set | frozenset):
                return sorted(str(self.value(where, item)) for item in value)
            if hasattr(value, "__dict__") or hasattr(value, "__slots__"):
                names = sorted({*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())})
                fields = {
                    key: self.value(f"{where}.{key}", getattr(value, key, None)) for key in names if key not in ("__weakref__", "__dict__")
                }
                return [f"{type(value).__module__}:{type(value).__qualname__}", fields]
        finally:
            self.seen.discard(id(value))
        self.opaque.append(where)
        return type(value).__qualname__
