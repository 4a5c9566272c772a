"""What a trace reads and Dynamo does not note.

Dynamo knows an object once, by the first place where it met it: a second place that leads to the same object is noted only where both are
locals or both are globals. Functions that it finds through a class, the process environment and a read of the gradient mode are not noted.
Here they are found from the code that was traced and from the places that the other guards lead through. Some of what is found was not
read; where it changes, a trace is made that would not have been necessary.
"""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from rung import torch_compat
from rung.compile.guards.base import Guard, Kind
from rung.compile.guards.describe import belongs_to_torch, describe
from rung.compile.guards.roots import GLOBALS, Roots
from rung.compile.hooks import FORWARD
from rung.compile.paths import Access, Path, follow
from rung.compile.sources import module_of

_MAX_ENTRIES = 1000  # of a container that is looked through for a second name
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GRADIENT_MODE = Path("<module torch>", (("attr", "is_grad_enabled"),))
_TOPOLOGY = Path("<module rung.torch_compat>", (("attr", "topology"),))


def more_guards(guards: Collection[Guard], codes: Collection[types.CodeType], roots: Roots) -> Iterator[Guard]:
    """The guards to add to those that Dynamo noted, for the user's code among `codes`."""
    places = _Places(guards, roots)
    named = [name for code in codes for name in _global_names(code, roots)]
    yield from places.ties(named)
    yield from _methods(places.objects, set(codes), roots)
    if any(_is_distributed(value) for _, value in named) or any("torch.distributed" in name for code in codes for name in code.co_names):
        yield Guard(Kind.RESULT, _TOPOLOGY, describe(torch_compat.topology()))
    for code in codes:
        if {"environ", "getenv"} & set(code.co_names):
            yield from _environment(code)
        if "is_grad_enabled" in code.co_names:
            yield Guard(Kind.RESULT, _GRADIENT_MODE, describe(torch.is_grad_enabled()))
        if "requires_grad" in code.co_names:
            tensors = [guard.path for guard in guards if guard.kind is Kind.TENSOR]
            flags = [Path(path.local, (*path.accesses, ("attr", "requires_grad"))) for path in tensors]
            yield from (Guard(Kind.VALUE, path, describe(path.resolve(roots))) for path in flags)


class _Places:
    """The first place of every object on the way to a guard, by whether the way begins at a global."""

    def __init__(self, guards: Collection[Guard], roots: Roots) -> None:
        self.roots = roots
        self.objects: dict[int, tuple[Any, Path]] = {}
        self._first: dict[bool, dict[int, Path]] = {True: {}, False: {}}
        self._known: set[Path] = set()
        for guard in guards:
            value: Any = roots[guard.path.local]
            for end in range(len(guard.path.accesses) + 1):
                path = Path(guard.path.local, guard.path.accesses[:end])
                if end:
                    try:
                        value = follow(value, path.accesses[-1])
                    except (KeyError, AttributeError, IndexError, TypeError):
                        break
                self._known.add(path)
                if _is_shared(value):
                    self._first[_is_global(path)].setdefault(id(value), path)
                    self.objects.setdefault(id(value), (value, path))

    def ties(self, named: Collection[tuple[Path, Any]]) -> Iterator[Guard]:
        """Guards for the second names: globals that the code reads, attributes and entries of objects that it reads from."""
        found = list(named)
        for value, path in self.objects.values():
            found += [(Path(path.local, (*path.accesses, access)), child) for access, child in _children(value, path)]
        for path, value in found:
            other = self._first[not _is_global(path)].get(id(value)) if _is_shared(value) else None
            if other is not None and path not in self._known:
                self._known.add(path)
                yield Guard(Kind.TIED, path, other.to_json())


def _is_global(path: Path) -> bool:
    return path.local == GLOBALS or path.local.startswith("<module ")


def _is_shared(value: Any) -> bool:
    """Whether Dynamo knows a value by its identity."""
    simple = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.FunctionType, types.CodeType, torch.Tensor)
    return not isinstance(value, simple) and not belongs_to_torch(value)


def _children(value: Any, path: Path) -> Iterator[tuple[Access, Any]]:
    if path.accesses and path.accesses[-1][1] in FORWARD:
        yield from ((("nth", index), child) for index, child in enumerate(value.values()))
    elif isinstance(value, list | tuple) and len(value) <= _MAX_ENTRIES:
        yield from ((("item", index), child) for index, child in enumerate(value))
    elif isinstance(value, Mapping):
        if len(value) <= _MAX_ENTRIES:
            yield from ((("item", key), child) for key, child in value.items() if isinstance(key, str | int))
    else:
        yield from ((("attr", name), child) for name, child in getattr(value, "__dict__", {}).items())


def _global_names(code: types.CodeType, roots: Roots) -> Iterator[tuple[Path, Any]]:
    """The globals that a function reads, and what it reads of them by attributes."""
    module = module_of(code.co_filename)
    root: Path | None = None
    value: Any = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if code.co_filename == roots.filename:
                root, value = Path(GLOBALS, (("item", name),)), roots[GLOBALS].get(name)
            else:
                root, value = Path(f"<module {module}>", (("attr", name),)), getattr(sys.modules.get(module), name, None)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and root is not None and name in getattr(value, "__dict__", ()):
            root, value = Path(root.local, (*root.accesses, ("attr", name))), value.__dict__[name]
        else:
            root = None
        if root is not None:
            yield root, value


def _is_distributed(value: Any) -> bool:
    """Whether a global belongs to torch.distributed: code that names it may ask for ranks, or talk to them."""
    module = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None)
    return isinstance(module, str) and module.startswith("torch.distributed")


def _methods(objects: Mapping[int, tuple[Any, Path]], codes: Collection[types.CodeType], roots: Roots) -> Iterator[Guard]:
    """Traced functions that were found through a class, each once for a class."""
    seen: set[type] = set()
    for value, path in objects.values():
        cls = type(value)
        if cls in seen:
            continue
        seen.add(cls)
        for index, base in enumerate(cls.__mro__):
            for name, member in vars(base).items():
                code = _code_of(member)
                if code is not None and code in codes and code is not roots.code and inspect.getattr_static(cls, name, None) is member:
                    way: tuple[Access, ...] = (("attr", "__class__"), ("attr", "__mro__"), ("item", index))
                    described = describe(member)
                    if described is not None:
                        yield Guard(Kind.OBJECT, Path(path.local, (*path.accesses, *way, ("attr", "__dict__"), ("item", name))), described)


def _code_of(member: Any) -> types.CodeType | None:
    function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _environment(code: types.CodeType) -> Iterator[Guard]:
    """Every variable that a string in the code may name."""
    path = Path("<module os>", (("attr", "environ"),))
    for name in code.co_consts:
        if isinstance(name, str) and _NAME.fullmatch(name):
            present = name in os.environ
            yield Guard(Kind.CONTAINS, path, [name, present])
            if present:
                yield Guard(Kind.VALUE, Path(path.local, (*path.accesses, ("item", name))), describe(os.environ[name]))
