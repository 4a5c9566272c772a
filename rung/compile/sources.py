"""The source of every function that a trace went through, so that an edited function is never served from an old plan."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype)
_TORCH = Path(torch.__file__).parent
_PYTHON = Path(os.__file__).parent
_COMPILE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A traced function: where to find its source again, and the hash of what it was."""

    module: str  # import name of the module, or "" when it cannot be imported by name
    qualname: str
    digest: str

    def to_json(self) -> list[str]:
        return [self.module, self.qualname, self.digest]


def source_refs(codes: Iterable[CodeType]) -> tuple[SourceRef, ...]:
    """One reference for each distinct function, in the order they were met. Functions of torch itself are covered by its version."""
    # "<string>" has methods generated for a class: see `type_refs`
    codes = [code for code in codes if code.co_filename != "<string>" and not _is_road(code)]
    refs = {code: _ref(code) for code in codes if not _is_torch(code)}
    names = {(ref.module, ref.qualname) for ref in refs.values()}
    return tuple(dict.fromkeys(ref for ref in refs.values() if (ref.module, _enclosing(ref.qualname)) not in names))


def _ref(code: CodeType) -> SourceRef:
    module = module_of(code.co_filename)
    return SourceRef(module, code.co_qualname, _digest_with_globals(module, code))


def _digest_with_globals(module: str, code: CodeType) -> str:
    """Hash of a function and of the plain values among the globals that it may read."""
    namespace = vars(sys.modules[module]) if module in sys.modules else {}
    found = {name: namespace[name] for name in _names(code) if name in namespace and not name.startswith("__")}
    plain = sorted((name, repr(value)) for name, value in found.items() if isinstance(value, _PLAIN))
    return hashlib.sha256(f"{code_digest(code)}{plain}".encode()).hexdigest()


def _names(code: CodeType) -> set[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for inner in nested for name in _names(inner))}


def type_refs(template: Mapping[str, Any]) -> tuple[SourceRef, ...]:
    """References to the classes that a return template builds."""
    refs = []
    if template["kind"] in ("object", "mapping"):
        module, _, qualname = template["type"].partition(":")
        digest = current_digest(SourceRef(module, qualname, ""))
        refs.append(SourceRef(module, qualname, digest or ""))
    for item in template.get("items", ()):
        refs += type_refs(item if isinstance(item, dict) else item[1])
    return tuple(dict.fromkeys(refs))


def user_code(codes: Iterable[CodeType]) -> list[CodeType]:
    """Those that belong neither to torch nor to Python."""
    return [code for code in codes if code.co_filename != "<string>" and not _is_torch(code) and not _is_python(code)]


def _enclosing(qualname: str) -> str | None:
    """The function that a nested one is written in; the text of that one contains it."""
    outer, found, _ = qualname.partition(".<locals>.")
    return outer if found else None


def code_digest(code: CodeType) -> str:
    """Hash of the source text of a code object; of its bytecode where no source exists, and with it where a line may hold several."""
    linecache.checkcache(code.co_filename)
    text = ""
    with suppress(OSError, TypeError):
        text = inspect.getsource(code)
    if not text or code.co_name == "<lambda>":
        text += repr((code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, CodeType)]))
    return hashlib.sha256(text.encode()).hexdigest()


def current_digest(ref: SourceRef) -> str | None:
    """The hash of the function as it is now, or None when it cannot be found."""
    if not ref.module or "<locals>" in ref.qualname:
        return None
    try:
        value: Any = import_module(ref.module)
        for part in ref.qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    if isinstance(value, type):
        return _class_digest(value)
    value = inspect.unwrap(value)
    original = getattr(value, "__rung_original__", value)
    code = getattr(original, "__code__", None) or getattr(getattr(original, "fget", None), "__code__", None)
    return None if code is None else _digest_with_globals(ref.module, code)


def _class_digest(cls: type) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()
    except (OSError, TypeError):  # a class without source, such as OrderedDict: its package's version is in the key
        return hashlib.sha256(cls.__qualname__.encode()).hexdigest()


def _is_torch(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(_TORCH)


def _is_road(code: CodeType) -> bool:
    """What rung puts between a caller and a wrapped function or a break; it leaves no operation in a graph."""
    path = Path(code.co_filename)
    return path.parent == _COMPILE or path == _COMPILE.parent / "api.py"


def _is_python(code: CodeType) -> bool:
    return Path(code.co_filename).parent == _PYTHON


@lru_cache(maxsize=1024)
def module_of(filename: str) -> str:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == filename and name != "__main__":
            return name
    return ""
