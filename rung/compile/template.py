"""The return template: how the user's output structure is rebuilt from the flat outputs of the graph.

It is recorded once, by running Dynamo's own bytecode around a stand-in for the graph that returns markers, and it is plain JSON.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from rung.errors import UnsupportedModuleError

Template = dict[str, Any]  # {"kind": ..., ...}; nested
_HINT = "return tensors, numbers, strings, enum members, None, or tuples, lists, dicts and dataclasses of them"


@dataclasses.dataclass(frozen=True, slots=True)
class Recorder:
    """Turns one sample of the user's output into a template."""

    outputs: Mapping[int, int]  # id of a marker -> index of the flat output
    integers: Mapping[int, int]  # a marker integer -> index of the flat output
    inputs: Mapping[int, int]  # id of a graph input -> its index among the placeholders

    def record(self, value: Any, where: str = "output") -> Template:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if type(value) in (bool, str, float, type(None)):
            return {"kind": "constant", "value": value}
        if type(value) is int:
            index = self.integers.get(value)
            return {"kind": "constant", "value": value} if index is None else {"kind": "output", "index": index}
        if isinstance(value, enum.Enum) and value.name in type(value).__members__:
            return {"kind": "member", "type": _type_name(value), "name": value.name}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return self._object(value, fields, where)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = dict(zip(value._fields, value, strict=True))
            return self._object(value, fields, where)
        if type(value) in (tuple, list):
            items = [self.record(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return {"kind": type(value).__name__, "items": items}
        if isinstance(value, Mapping):
            return {**_kind_of_mapping(value, where), "items": self._mapping(value, where)}
        raise UnsupportedModuleError(
            f"the module returns a {type(value).__name__} at {where}, which cannot be rebuilt from a compiled graph", hint=_HINT
        )

    def _object(self, value: Any, fields: Mapping[str, Any], where: str) -> Template:
        _refuse_unmade(lambda: type(value)(**fields), value, where)
        return {"kind": "object", "type": _type_name(value), "items": self._mapping(fields, where)}

    def _mapping(self, items: Mapping[Any, Any], where: str) -> list[list[Any]]:
        for key in items:
            if type(key) not in (str, int, bool):
                raise UnsupportedModuleError(
                    f"the module returns a mapping at {where} with the key {key!r}", hint="use strings or integers as keys"
                )
        return [[key, self.record(item, f"{where}[{key!r}]")] for key, item in items.items()]

    def _tensor(self, value: torch.Tensor, where: str) -> Template:
        if id(value) in self.outputs:
            return {"kind": "output", "index": self.outputs[id(value)]}
        if id(value) in self.inputs:
            return {"kind": "input", "index": self.inputs[id(value)]}
        raise UnsupportedModuleError(
            f"the module returns a tensor at {where} that the graph neither computes nor reads",
            hint="of a tensor that forward does not use return a copy (`x.clone()`), or return it where the module is called; in place of "
            "a property (x.T, x.mT, x.data) call the method (x.t(), x.transpose(-2, -1), x.detach())",
        )


def difference(template: Template, other: Template, where: str = "output") -> str:
    """What stands where two recordings with other markers differ, and where that is: it was computed from a size. Empty text: nowhere."""
    if repr(template) == repr(other):  # repr: nan is equal to itself
        return ""
    for index, (item, another) in enumerate(zip(template.get("items", ()), other.get("items", ()), strict=False)):
        if isinstance(item, dict):
            found = difference(item, another, f"{where}[{index}]")
        else:
            found = "" if item[0] != another[0] else difference(item[1], another[1], f"{where}[{item[0]!r}]")
        if found:
            return found
    return f"a {type(template['value']).__name__} at {where}" if "value" in template else f"the keys of {where}"


def render(template: Template, outputs: Sequence[str], inputs: Sequence[str], bind: Callable[[Any], str]) -> str:
    """Python source that rebuilds the structure; `bind` gives a name to an object that the source refers to."""
    kind = template["kind"]
    if kind == "output":
        return outputs[template["index"]]
    if kind == "input":
        return inputs[template["index"]]
    if kind == "constant":
        return bind(template["value"]) if isinstance(template["value"], float) else repr(template["value"])
    if kind == "member":
        return bind(_load_type(template["type"])[template["name"]])
    if kind in ("tuple", "list"):
        items = [render(item, outputs, inputs, bind) for item in template["items"]]
        return "[" + ", ".join(items) + "]" if kind == "list" else "(" + "".join(f"{item}, " for item in items) + ")"
    pairs = [(key, render(item, outputs, inputs, bind)) for key, item in template["items"]]
    if kind == "object":
        return f"{bind(_load_type(template['type']))}({', '.join(f'{key}={value}' for key, value in pairs)})"
    literal = "{" + ", ".join(f"{key!r}: {value}" for key, value in pairs) + "}"
    if kind == "defaultdict":
        factory = template["factory"]
        return f"{bind(defaultdict)}({None if factory is None else bind(_load_type(factory))}, {literal})"
    return literal if kind == "dict" else f"{bind(_load_type(template['type']))}({literal})"


def _kind_of_mapping(value: Mapping[Any, Any], where: str) -> Template:
    """A type of mapping other than dict is called with the items, a defaultdict with its factory in front. Raises
    `UnsupportedModuleError` for one that cannot be called so."""
    if type(value) is dict:
        return {"kind": "dict"}
    if type(value) is defaultdict:
        factory = value.default_factory
        if factory is None:
            return {"kind": "defaultdict", "factory": None}
        if isinstance(factory, type) and "<locals>" not in factory.__qualname__:
            return {"kind": "defaultdict", "factory": f"{factory.__module__}:{factory.__qualname__}"}
        raise UnsupportedModuleError(
            f"the module returns a defaultdict at {where}, whose default {factory!r} has no name under which it can be found again",
            hint="return dict(...) of it, or use a class as its default, such as list",
        )
    kind = {"kind": "mapping", "type": _type_name(value)}
    try:
        same = list(type(value)(dict(value))) == list(value)  # type: ignore[call-arg]
    except Exception:
        same = False
    if not same:
        raise UnsupportedModuleError(
            f"the module returns a {type(value).__name__} at {where}, which cannot be made from a dict of its items",
            hint="return dict(...) of it",
        )
    return kind


def _refuse_unmade(make: Callable[[], Any], value: Any, where: str) -> None:
    """Raise `UnsupportedModuleError` if an object cannot be made again as the template would."""
    try:
        make()
    except Exception as error:
        raise UnsupportedModuleError(
            f"the module returns a {type(value).__name__} at {where}, which cannot be made from its items: {error}", hint=_HINT
        ) from error


def _type_name(value: Any) -> str:
    cls = type(value)
    if "<locals>" in cls.__qualname__:
        raise UnsupportedModuleError(
            f"the module returns a {cls.__qualname__}, a class defined inside a function", hint="define the class at module level"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def _load_type(name: str) -> Any:
    module, _, qualname = name.partition(":")
    value: Any = import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value
