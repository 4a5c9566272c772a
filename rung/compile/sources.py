"""The source of every function that a trace went through, so that an edited function is never served from an old plan."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype)
_TORCH = Path(torch.__file__).parent
_PYTHON = Path(os.__file__).parent
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_COMPILE = Path(__file__).parent
_MAIN = "__main__"


@dataclass(frozen=True, slots=True)
class SourceRef:
    """Where to find the source of a traced function again, and the hash of what it was."""

    module: str  # import name of the module, or "" when nothing leads to the function
    qualname: str  # of the function, or of the outermost one that it is written in; "" for the text of the whole module
    digest: str

    @property
    def name(self) -> str:
        """For messages."""
        return self.qualname or f"the module {self.module}"

    def to_json(self) -> list[str]:
        return [self.module, self.qualname, self.digest]


def source_refs(codes: Iterable[CodeType]) -> tuple[SourceRef, ...]:
    """One reference for each distinct function, in the order they were met. Those of torch and Python are covered by their versions."""
    return tuple(dict.fromkeys(_ref(code) for code in user_code(codes) if not _is_road(code)))


def user_code(codes: Iterable[CodeType]) -> list[CodeType]:
    """Those that belong neither to torch nor to Python."""
    return [code for code in codes if not _is_generated(code) and not _is_torch(code) and not _is_python(code)]


def _ref(code: CodeType) -> SourceRef:
    module, name = module_of(code.co_filename) or _MAIN, _outermost(code.co_qualname)
    found = _named(module, name)
    if isinstance(found, CodeType) and code in _nested(found):
        return SourceRef(module, name, _digest_with_globals(module, found))
    if _holds(module, code):  # a lambda of the module, or a decorator put something else under the name
        return SourceRef(module, "", _module_digest(module) or "")
    return SourceRef("", code.co_qualname, "")


def _outermost(qualname: str) -> str:
    """The function that a nested one is written in: its text contains the nested one, and it has a name in its module."""
    return qualname.partition(".<locals>.")[0]


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function and those that are written in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _holds(module: str, code: CodeType) -> bool:
    """Whether the text of a module, as it is now, compiles to `code`."""
    text = "".join(linecache.getlines(code.co_filename)) if module != _MAIN else ""
    try:
        return code in _nested(compile(text, code.co_filename, "exec", dont_inherit=True))
    except (SyntaxError, ValueError):
        return False


def _module_digest(module: str) -> str | None:
    """Hash of the text of a module and of its plain values, None when it has no text."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return None
    linecache.checkcache(file)
    values = sorted((name, repr(value)) for name, value in vars(sys.modules[module]).items() if _is_plain(name, value))
    return hashlib.sha256(f"{''.join(linecache.getlines(file))}{values}".encode()).hexdigest()


def _digest_with_globals(module: str, code: CodeType) -> str:
    """Hash of a function and of the plain values among the globals that it may read."""
    namespace = vars(sys.modules[module]) if module in sys.modules else {}
    names = {name for inner in _nested(code) for name in inner.co_names if name in namespace}
    plain = sorted((name, repr(namespace[name])) for name in names if _is_plain(name, namespace[name]))
    return hashlib.sha256(f"{code_digest(code)}{plain}".encode()).hexdigest()


def _is_plain(name: str, value: Any) -> bool:
    return isinstance(value, _PLAIN) and not name.startswith("__")


def type_refs(template: Mapping[str, Any]) -> tuple[SourceRef, ...]:
    """References to the classes that a return template builds."""
    refs = []
    if name := template.get("type") or template.get("factory"):
        module, _, qualname = name.partition(":")
        digest = current_digest(SourceRef(module, qualname, ""))
        refs.append(SourceRef(module, qualname, digest or ""))
    for item in template.get("items", ()):
        refs += type_refs(item if isinstance(item, dict) else item[1])
    return tuple(dict.fromkeys(refs))


def code_digest(code: CodeType) -> str:
    """Hash of a function: of its text, which has decorators and defaults, where there is one, and of its bytecode, which is what runs when
    the file was edited after its import."""
    linecache.checkcache(code.co_filename)
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError):
        text = ""
    compiled = [(inner.co_code, inner.co_names, inner.co_freevars, _constants(inner.co_consts)) for inner in _nested(code)]
    return hashlib.sha256(f"{text}{compiled}".encode()).hexdigest()


def _constants(values: Iterable[Any]) -> list[Any]:
    """Those of a function beside nested functions, as texts that do not depend on hash seeds."""
    kept = [value for value in values if not isinstance(value, CodeType)]
    return [sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value) for value in kept]


def current_digest(ref: SourceRef) -> str | None:
    """The hash of the function as it is now, or None when it cannot be found."""
    if not ref.module:
        return None
    found = _named(ref.module, ref.qualname)
    if isinstance(found, type):
        return _class_digest(found)
    if ref.qualname:
        return None if found is None else _digest_with_globals(ref.module, found)
    return _module_digest(ref.module) if ref.module in sys.modules else None


def _named(module: str, qualname: str) -> CodeType | type | None:
    """The class, or the code of the function below its decorators, that a module has under a name."""
    try:
        value: Any = import_module(module)
        for part in qualname.split(".") if qualname else ():
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    if isinstance(value, type):
        return value
    value = inspect.unwrap(value.func if isinstance(value, cached_property) else value)
    original = getattr(value, "__rung_original__", value)
    code = getattr(original, "__code__", None) or getattr(getattr(original, "fget", None), "__code__", None)
    return code if isinstance(code, CodeType) else None


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
    path = Path(code.co_filename)
    return code.co_filename.startswith("<frozen ") or (path.is_relative_to(_PYTHON) and _PACKAGES.isdisjoint(path.parts))


def _is_generated(code: CodeType) -> bool:
    """A method that Python made for a dataclass or a named tuple; `type_refs` has its class."""
    made = code.co_qualname.startswith("__create_fn__.") or code.co_names == ("_tuple_new",)
    return made and code.co_filename == "<string>"


@lru_cache(maxsize=1024)
def module_of(filename: str) -> str:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == filename and name != "__main__":
            return name
    return ""
