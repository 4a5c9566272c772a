"""The closed set of guard kinds, and guards as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rung.compile.guards.describe import describe
from rung.compile.guards.roots import GLOBALS, shown
from rung.compile.hooks import how_called
from rung.compile.paths import Path


class Kind(StrEnum):
    """What a guard asserts of the object at its path."""

    VALUE = "value"  # a number, string or other constant with this type and value
    OBJECT = "object"  # this function, class or module
    TYPE = "type"  # an object of this class
    LENGTH = "length"  # a sequence of this length
    KEYS = "keys"  # a mapping with these keys, in order
    CONTAINS = "contains"  # a container with, or without, this key
    ATTRIBUTE = "attribute"  # an object with, or without, an attribute of this name
    OVERRIDE = "override"  # a module whose instance does not hide this attribute of its class
    HOOKS = "hooks"  # a module with this many hooks of its own, called in this way; what they are, other guards say
    TENSOR = "tensor"  # a tensor of this layout; its address and identity are looked at behind the work
    TIED = "tied"  # the same object as at another path
    RESULT = "result"  # a function that, called without arguments, gives this value


_GONE = object()


@dataclass(frozen=True, slots=True)
class Guard:
    """One assertion. `value` is JSON: a description (see `describe`), a length, a name, or [name, present]."""

    kind: Kind
    path: Path
    value: Any = None

    def violation(self, roots: Mapping[str, Any]) -> str:
        """What does not hold, in words; empty when the guard holds. Slow: it walks the path and describes what it finds."""
        found = self._resolve(self.path, roots)
        if found is _GONE:
            return f"{self.name} is gone"
        if self.kind in (Kind.VALUE, Kind.OBJECT, Kind.TENSOR):
            now = describe(found)
            return "" if now == self.value else f"{self.name} was {_words(self.value)} and is {_words(now)}"
        if self.kind is Kind.TYPE:
            now = describe(type(found))
            return "" if now == self.value else f"{self.name} was an object of {_words(self.value)} and is one of {_words(now)}"
        if self.kind is Kind.LENGTH:
            return "" if len(found) == self.value else f"{self.name} had {self.value} entries and has {len(found)}"
        if self.kind is Kind.KEYS:
            now = [describe(key) for key in found]
            return "" if now == self.value else f"{self.name} has other keys, or an other order of them"
        if self.kind is Kind.RESULT:
            now = describe(found())
            return "" if now == self.value else f"{self.name}() was {_words(self.value)} and is {_words(now)}"
        if self.kind is Kind.HOOKS:
            return self._other_hooks(how_called(Path(self.path.local, self.path.accesses[:-1]).resolve(roots), self.path.accesses[-1][1]))
        if self.kind is Kind.TIED:
            other = self._resolve(Path.from_json(self.value), roots)
            return "" if other is found else f"{self.name} is no longer tied to {named(Path.from_json(self.value))}"
        key, present = self.value
        if self.kind is Kind.CONTAINS:
            return "" if (key in found) is present else f"{self.name} {'lost' if present else 'gained'} the entry {key!r}"
        there = key in vars(found) if self.kind is Kind.OVERRIDE else hasattr(found, key)
        return "" if there is present else f"{self.name} {'lost' if present else 'gained'} the attribute {key!r}"

    def _other_hooks(self, now: list[list[bool]]) -> str:
        if now == self.value:
            return ""
        if not self.value:
            return f"{self.name} has entries now"
        return f"{self.name} had {len(self.value)} entries and has {len(now)}, or others that are called in another way"

    def is_dropped(self, kinds: Collection[str]) -> bool:
        """Whether it is of one of these kinds; what a hook reads goes with the hooks."""
        return self.kind in kinds or (Kind.HOOKS in kinds and any(access == "nth" for access, _ in self.path.accesses))

    @property
    def name(self) -> str:
        return named(self.path)

    @staticmethod
    def _resolve(path: Path, roots: Mapping[str, Any]) -> Any:
        try:
            return path.resolve(roots)
        except (KeyError, AttributeError, IndexError, TypeError, ImportError):
            return _GONE

    def to_json(self) -> list[Any]:
        return [str(self.kind), self.path.to_json(), self.value]

    @staticmethod
    def from_json(data: list[Any]) -> Guard:
        return Guard(Kind(data[0]), Path.from_json(data[1]), data[2])


@dataclass(frozen=True, slots=True)
class GuardSet:
    """All guards of a trace. `unknown` are those of Dynamo that have no kind here: they are not checked, and the plan is not kept."""

    guards: tuple[Guard, ...] = ()
    unknown: tuple[str, ...] = ()

    def violation(self, roots: Mapping[str, Any], dropped: Collection[str] = ()) -> str:
        """The text of the first guard that does not hold, or empty."""
        return next((text for guard in self.guards if not guard.is_dropped(dropped) and (text := guard.violation(roots))), "")

    def to_json(self) -> list[Any]:
        return [guard.to_json() for guard in self.guards]

    @staticmethod
    def from_json(data: list[Any]) -> GuardSet:
        return GuardSet(tuple(Guard.from_json(item) for item in data))


NO_GUARDS = GuardSet()


def named(path: Path) -> str:
    """A path as a person writes it: `layers.0.eps` of the module, `global SCALE`, `package.module.NAME`."""
    text = ".".join(str(key) for _, key in path.accesses if key not in ("_modules", "_parameters", "_buffers"))
    root = shown(path.local)
    if path.local == GLOBALS:
        return f"{root} {text!r}"
    return repr(f"{root}.{text}" if text else root)


def _words(described: Any) -> str:
    """A description without its tag."""
    if isinstance(described, list) and len(described) == 2:
        return str(described[1])
    return "something else" if described is None else str(described)
