"""Keys: ordered, named factors and their hash. The factors lie beside the entry, so that a miss can be explained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rung.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Factor:
    """Something that a result depends on. `value` is JSON and holds no path, rank, ordinal, host name or process id.

    `changes_code` says whether the code of a piece depends on it, or only what is traced and how the pieces are used."""

    name: str
    value: Any
    changes_code: bool = True


class FactorSource(Protocol):
    """Whatever has a say in a key: a pass manager, an attention backend, a provider."""

    def factors(self) -> Iterable[Factor]: ...


class Factors:
    """The factors of one key, in the order in which they were declared; a name is declared once."""

    def __init__(self, declared: Iterable[Factor] = ()) -> None:
        self._declared: dict[str, Factor] = {}
        for factor in declared:
            self.add(factor)

    def add(self, factor: Factor) -> None:
        if factor.name in self._declared:
            raise ConfigError(f"two sources declare the cache factor {factor.name!r}", hint="put the name of its owner in front of one")
        self._declared[factor.name] = factor

    def __iter__(self) -> Iterator[Factor]:
        return iter(self._declared.values())

    def values(self, *, code_only: bool = False) -> dict[str, Any]:
        """name -> value; with `code_only` those that change code."""
        return {factor.name: factor.value for factor in self if factor.changes_code or not code_only}


def key_of(factors: Mapping[str, object]) -> str:
    """Hash of named factors; the order in which they were given does not matter. Values must be JSON."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The factors that differ: name -> (old, new). Of mappings the entries that differ, under dotted names; what one side lacks is None."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found.update({f"{name}.{inner}": pair for inner, pair in difference(before, after).items()})
        elif before != after:
            found[name] = (before, after)
    return found


def describe(differences: Mapping[str, tuple[Any, Any]], *, limit: int = 3) -> str:
    """The first differences in words."""
    parts = [f"{name}: {short(old)} -> {short(new)}" for name, (old, new) in list(differences.items())[:limit]]
    more = len(differences) - len(parts)
    return "; ".join([*parts, *([f"and {more} more"] if more else [])])


def short(value: Any) -> str:
    """A value in a few words; of a long one its beginning and a hash."""
    text = "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]}...({hashlib.sha256(text.encode()).hexdigest()[:8]})"
