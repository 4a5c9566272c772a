"""Where the paths of guards begin: the module (or other owner), the globals of the traced function, imported modules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from rung.compile.paths import Access, NthKey, Path, parse_accesses
from rung.compile.signature import self_name, shifted_path, variadic_self

GLOBALS = "<globals>"
FUNCTION = "<function>"
ARGUMENT = Path("<argument>")  # stands for every argument of the call
_MODULE = "<module "
_FIELD = re.compile(r"^___dataclass_fields\((.*)\)\[(\d+)\](.*)$")  # Dynamo's name for a field of a dataclass that the trace constructs
_IMPORTED = "__import_"  # Dynamo's name in the globals for a module whose function it traced into


class Roots(Mapping[str, Any]):
    """Locals of `Path.resolve`: the owner under its traced name, `<globals>`, and `<module a.b>` for any module that can be imported."""

    def __init__(self, function: Callable[..., Any], ignored: Collection[tuple[str, str]] = ()) -> None:
        self._ignored = [(holder, [*(holder.split(".") if holder and holder[0] != "<" else ()), name]) for holder, name in ignored]
        owner = getattr(function, "__self__", None)
        plain = getattr(function, "__func__", function)
        self._variadic = variadic_self(function)  # asked once: a trace notes thousands of guards
        self._values: dict[str, Any] = {GLOBALS: getattr(plain, "__globals__", {}), FUNCTION: plain}
        self.owner_name = ""
        if owner is not None:
            self.owner_name = self_name(function)
            self._values[self.owner_name] = owner

    @property
    def code(self) -> Any:
        """The code of the traced function."""
        return getattr(self._values[FUNCTION], "__code__", None)

    @property
    def filename(self) -> str:
        """Where it stands; other code of this file reads the same globals."""
        return getattr(self.code, "co_filename", "")

    def __getitem__(self, name: str) -> Any:
        if name.startswith(_MODULE):
            return import_module(name.removeprefix(_MODULE).removesuffix(">"))
        return self._values[name]

    def local(self, name: str, accesses: tuple[Access, ...]) -> Path:
        """The path behind a local of the traced function: the owner, a variable of an enclosing function, or an argument."""
        path = shifted_path(Path(name, accesses), self._variadic)
        if path.local == self.owner_name:
            return path
        free = getattr(getattr(self._values[FUNCTION], "__code__", None), "co_freevars", ())
        if name not in free:
            return ARGUMENT
        return Path(FUNCTION, (("attr", "__closure__"), ("item", free.index(name)), ("attr", "cell_contents"), *accesses))

    def find(self, source: str) -> Any:
        """The object behind a source expression, None when it is an argument or cannot be found."""
        path = path_of(source, self)
        try:
            return None if path is None or path is ARGUMENT else path.resolve(self)
        except (KeyError, AttributeError, IndexError, TypeError, ImportError):
            return None

    def ignores(self, path: Path) -> bool:
        """Whether a path leads through a function that only stood there during the trace: (submodule or `<module a.b>`, name)."""
        names = [str(key) for _, key in path.accesses if key not in ("_modules", "__dict__")]
        own = self._values[GLOBALS].get("__name__", "")
        root = f"<module {own}>" if path.local == GLOBALS else path.local
        return any(
            names[: len(ignored)] == ignored and root == (holder if holder.startswith("<") else self.owner_name)
            for holder, ignored in self._ignored
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def root_of_global(name: str) -> str | None:
    """`<module a.b>` for Dynamo's name of an imported module, None for a name of the user's."""
    if not name.startswith(_IMPORTED):
        return None
    return f"{_MODULE}{name.removeprefix(_IMPORTED).replace('_dot_', '.')}>"


def path_of(source: str, roots: Roots) -> Path | None:
    """The path behind a source expression, `ARGUMENT` for arguments of the call, None for one that is more than attributes and items."""
    if not source:
        return None
    if (field := _FIELD.match(source)) is not None:
        owner = roots.find(field[1])
        if not (isinstance(owner, type) and dataclasses.is_dataclass(owner)):
            return None
        source = f"{field[1]}.__dataclass_fields__[{dataclasses.fields(owner)[int(field[2])].name!r}]{field[3]}"
    try:
        parsed = parse_accesses(source)
    except (SyntaxError, ValueError):
        return None
    if parsed is None:
        return None
    scope, name, accesses = parsed
    if any(isinstance(key, NthKey) for _, key in accesses):
        accesses = tuple((kind, key_of(key, roots) if isinstance(key, NthKey) else key) for kind, key in accesses)
        if any(key is None for _, key in accesses):
            return None
    if scope == "L":
        path = roots.local(name, accesses)
    else:
        root = root_of_global(name)
        path = Path(GLOBALS, (("item", name), *accesses)) if root is None else Path(root, accesses)
    return ARGUMENT if roots.ignores(path) else path


def key_of(key: NthKey, roots: Roots) -> str | int | None:
    """The key that a trace met at this place of a mapping, if it can be written down."""
    mapping = roots.find(key.source)
    found = list(mapping)[key.index] if isinstance(mapping, Mapping) and key.index < len(mapping) else None
    return found if isinstance(found, str | int) else None


def shown(name: str) -> str:
    """A root in a message."""
    if name == FUNCTION:
        return "the function"
    return "global" if name == GLOBALS else name.removeprefix(_MODULE).removesuffix(">") if name.startswith(_MODULE) else name
