"""What an error calls the things that a function changes beside its results, and where in its code it does."""

from __future__ import annotations

import dis
import linecache
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rung import torch_compat
from rung.compile.guards.base import named
from rung.compile.guards.roots import ARGUMENT, GLOBALS, Roots, path_of
from rung.compile.sources import user_code

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes)


def changed_globals(bytecode: types.CodeType, after: Mapping[str, Any], roots: Roots) -> dict[str, bool]:
    """The globals that the code of a capture assigns; whether each is another one in its namespace `after` a run."""
    names = [str(one.argval) for one in dis.get_instructions(bytecode) if one.opname == "STORE_GLOBAL"]
    return {name: not _equal(roots[GLOBALS].get(name, _MISSING), after.get(name, _MISSING)) for name in names}


def _equal(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and old == new)


def name_of_global(name: str, codes: Collection[types.CodeType]) -> str:
    """With the place where it is assigned."""
    return f"global {name!r}{_place(codes, 'STORE_GLOBAL', name)}"


def name_of_effect(source: str, attribute: str, roots: Roots, codes: Collection[types.CodeType]) -> str:
    """Of the object behind Dynamo's `source`, or of an attribute of it, with the place where that is assigned."""
    found, path = roots.find(source), path_of(source, roots)
    if isinstance(found, types.CellType) or source == "<unknown source>":
        return f"a variable of an enclosing function{_place(codes, 'STORE_DEREF')}"
    if isinstance(found, type | types.ModuleType):
        what = f"{'class' if isinstance(found, type) else 'module'} {getattr(found, '__qualname__', found.__name__)!r}"
    else:
        what = source if path is None or path is ARGUMENT else named(path)
    if not attribute:
        return what
    return f"the attribute {attribute!r} of {what}{_place(codes, 'STORE_ATTR', attribute) or _place(codes, 'STORE_GLOBAL', attribute)}"


def _place(codes: Collection[types.CodeType], opcode: str, name: str | None = None) -> str:
    """Where the code first has this instruction, for this name or for any variable that is not its own; an empty text where it has not."""
    return next(_places(codes, opcode, name), "")


def _places(codes: Collection[types.CodeType], opcode: str, name: str | None) -> Iterator[str]:
    for code in user_code(codes):
        for one in dis.get_instructions(code):
            if one.opname == opcode and (one.argval == name or (name is None and one.argval in code.co_freevars)):
                line = one.positions.lineno if one.positions is not None else None
                yield torch_compat.place(code.co_filename, line, linecache.getline(code.co_filename, line or 0))
