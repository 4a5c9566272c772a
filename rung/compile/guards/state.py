"""Whether what a trace has read still is what it was: one generated check before a call, a part of tensors and submodules behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from rung import torch_compat
from rung.compile.generated import Source
from rung.compile.guards.base import Guard, GuardSet, Kind
from rung.compile.guards.edges import Edge, edge_of
from rung.compile.guards.roots import Roots

PART = 32  # tensors looked at behind a call: about 3 us
OVERRIDES = 16  # and overrides of methods
TABLES = 32  # and modules with submodules: about 2 us

_UNCHECKED = frozenset(
    {"__class__", "__code__", "__dict__", "__closure__", "_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"}
)


class GuardState:
    """The guards of one trace, bound to the objects that are there now.

    `unchanged()` compares objects by identity, each place once however many guards lead through it: scalars, functions, containers,
    hooks. `swept()` looks at a part of the submodules and tensors, and at the first and last tensor, which every conversion of a module
    moves.
    Neither describes anything; when one says no, `violation()` tells whether a trace would come out differently, and of what."""

    def __init__(self, guards: GuardSet, roots: Roots, dropped: Collection[str] = ()) -> None:
        self.guards = GuardSet(tuple(guard for guard in guards.guards if guard.kind not in dropped), guards.unknown)
        self.roots = roots
        self._submodules = "submodules" not in dropped
        self.refresh()

    def refresh(self) -> None:
        """Take the objects that are there now for those that were traced."""
        self._slots: dict[tuple[int, str, Any], Edge] = {}
        self._checks: dict[str, None] = {}
        self.source = Source("unchanged", "")
        self._tables: dict[int, Any] = {}  # of submodules
        self._tensor_tables: set[int] = set()
        self._hooks: list[Any] = [*torch_compat.global_hooks()]
        self._overrides: dict[tuple[int, str], tuple[Any, str]] = {}
        for guard in self.guards.guards:
            self._bind(guard)
        tables = [table for table in self._tables.values() if table] if self._submodules else []
        # Dicts compare their values by identity first, in C.
        self._all_tables = tables, [dict(table) for table in tables]
        self._table_parts = itertools.cycle(zip(*(_parts(side, TABLES) for side in self._all_tables), strict=True))
        self.unchanged: Callable[[], bool] = self._build()
        entries = [edge.entry() for edge in self._slots.values() if self._is_swept(edge)]
        self._ends = [entries[0], entries[-1]] if len(entries) > PART else []
        self._parts = itertools.cycle(_parts(entries, PART))
        self._override_parts = itertools.cycle(_parts(list(self._overrides.values()), OVERRIDES))
        self._all = entries, list(self._overrides.values())
        del self._slots, self._checks, self._tables, self._tensor_tables, self._overrides

    def swept(self) -> bool:
        """Whether the next part of the submodules and tensors is the same, and lies where it lay."""
        for own, name in next(self._override_parts):
            if name in own:
                return False
        tables, seen = next(self._table_parts)
        return tables == seen and self._same(self._ends) and self._same(next(self._parts))

    def all_swept(self) -> bool:
        """Whether all of them are."""
        entries, overrides = self._all
        tables, seen = self._all_tables
        return tables == seen and self._same(entries) and not any(name in own for own, name in overrides)

    def violation(self) -> str:
        """The first guard that does not hold by value, in words; empty when objects changed but a trace would come out as it did."""
        return self.guards.violation(self.roots)

    @staticmethod
    def _same(entries: list[Any]) -> bool:
        try:
            for container, key, seen, address in entries:
                if container[key] is not seen or (address and seen.data_ptr() != address):
                    return False
        except (KeyError, AttributeError, IndexError):
            return False
        return True

    # --- binding ---------------------------------------------------------------------------------------------------------------------

    def _bind(self, guard: Guard) -> None:
        value: Any = self.roots[guard.path.local]
        for access in guard.path.accesses:
            value = self._follow(value, access)
        bind = self.source.bind
        if guard.kind is Kind.HOOKS:
            self._hooks.append(value)
        elif guard.kind is Kind.OVERRIDE:
            own = vars(value)
            self._overrides[id(own), guard.value[0]] = (own, guard.value[0])
        elif id(value) in self._tables:
            return  # compared as a whole
        elif guard.kind is Kind.LENGTH:
            self._checks[f"len({bind(value)}) == {guard.value}"] = None
        elif guard.kind is Kind.KEYS:
            self._checks[f"(*{bind(value)},) == {bind((*value,))}"] = None
        elif guard.kind is Kind.CONTAINS:
            key, present = guard.value
            self._checks[f"({key!r} in {bind(value)}) is {present}"] = None
        elif guard.kind is Kind.ATTRIBUTE:
            key, present = guard.value
            self._checks[f"{bind(hasattr)}({bind(value)}, {key!r}) is {present}"] = None

    def _follow(self, container: Any, access: tuple[str, Any]) -> Any:
        """One access; its check is noted where it is the first through this place."""
        edge = edge_of(container, access)
        if isinstance(container, nn.Module):
            self._tensor_tables |= {id(container._parameters), id(container._buffers)}
        place = (id(edge.container), edge.kind, edge.key if isinstance(edge.key, str | int) else id(edge.key))
        if place in self._slots:
            return self._slots[place].child
        self._slots[place] = edge
        if isinstance(container, nn.Module) and edge.key == "_modules":
            self._tables[id(edge.child)] = edge.child
        elif self._is_swept(edge) or edge.key in _UNCHECKED or id(edge.container) in self._tables:
            pass
        else:
            comparison = "is" if edge.stable else "=="
            self._checks[f"{edge.expression(self.source)} {comparison} {self.source.bind(edge.child)}"] = None
        return edge.child

    def _is_swept(self, edge: Edge) -> bool:
        """A tensor, or a parameter that is None."""
        return isinstance(edge.child, torch.Tensor) or id(edge.container) in self._tensor_tables

    def _build(self) -> Callable[[], bool]:
        source = self.source
        checks = [f"not {source.bind(any)}({source.bind(self._hooks)})", *self._checks]
        source.lines += [
            "try:",
            f"    return {' and '.join(checks)}",
            "except Exception:",  # something on the way is gone, or of another type
            "    return False",
        ]
        return source.build("guards")


def _parts(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)] or [[]]
