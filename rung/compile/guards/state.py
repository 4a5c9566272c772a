"""Whether what a trace has read still is what it was: one generated check before a call, a part of tensors and submodules behind it."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from rung import torch_compat
from rung.compile.generated import Source
from rung.compile.guards.base import Guard, GuardSet
from rung.compile.guards.edges import Edge, edge_of
from rung.compile.guards.late import LateChecks
from rung.compile.guards.roots import Roots
from rung.errors import GuardError

_UNCHECKED = frozenset(
    {"__class__", "__code__", "__dict__", "__closure__", "_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"}
)


class GuardState:
    """The guards of one trace, bound to the objects that are there now.

    `unchanged()` compares objects by identity, each place once however many guards lead through it: scalars, functions and their code,
    containers, hooks. `swept()` looks at a part of the submodules and tensors, and at the first and last tensor, which every conversion of
    a module moves; `identities_swept()` at all of them, `all_swept()` at their sizes and strides too. None describes anything; when one
    says no, `violation()` tells whether a trace would come out differently, and of what."""

    def __init__(self, guards: GuardSet, roots: Roots, dropped: Collection[str] = ()) -> None:
        self.guards = GuardSet(tuple(guard for guard in guards.guards if not guard.is_dropped(dropped)), guards.unknown)
        self.roots = roots
        self._submodules = "submodules" not in dropped
        self.refresh()

    def refresh(self) -> None:
        """Take the objects that are there now for those that were traced. Raises `GuardError` where the way to one is gone."""
        self._slots: dict[tuple[int, str, Any], Edge] = {}
        self._checks: dict[str, None] = {}
        self.source = Source("unchanged", "")
        self._modules: dict[int, nn.Module] = {}
        self._tables: set[int] = set()  # of submodules
        self._tensor_tables: set[int] = set()
        self._hooks: list[Any] = [*torch_compat.global_hooks()]
        self._overrides: dict[tuple[int, str], tuple[Any, str]] = {}
        try:
            for guard in self.guards.guards:
                self._bind(guard)
        except (KeyError, AttributeError, IndexError, TypeError) as error:
            violated = self.violation()
            if not violated:
                raise
            raise GuardError(
                f"what the trace read was changed while it was compiled: {violated}",
                hint="call again; code that swaps functions or containers during a call cannot be compiled",
            ) from error
        tensors = [edge for edge in self._slots.values() if self._is_swept(edge)]
        modules = list(self._modules.values()) if self._submodules else []
        late = LateChecks(tensors, modules, list(self._overrides.values()), self._hooks)
        self.unchanged: Callable[[], bool] = self._build()
        self.swept: Callable[[], bool] = late.next
        self.identities_swept: Callable[[], bool] = late.identities
        self.all_swept: Callable[[], bool] = late.all
        del self._slots, self._checks, self._modules, self._tables, self._tensor_tables, self._hooks, self._overrides

    def violation(self) -> str:
        """The first guard that does not hold by value, in words; empty when objects changed but a trace would come out as it did."""
        return self.guards.violation(self.roots)

    # --- binding ---------------------------------------------------------------------------------------------------------------------

    def _bind(self, guard: Guard) -> None:
        value: Any = self.roots[guard.path.local]
        for access in guard.path.accesses:
            value = self._follow(value, access)
        check = getattr(self, f"_bind_{guard.kind}", None)  # for the other kinds the way to the place says all
        if check is not None:
            check(value, guard.value)

    def _check(self, text: str) -> None:
        self._checks[text] = None

    def _bind_hooks(self, found: Any, _: Any) -> None:
        if found:  # which hooks these are, the guards of what they read say
            self._bind_keys(found, None)
        else:
            self._hooks.append(found)

    def _bind_object(self, found: Any, _: Any) -> None:
        function = getattr(found, "__func__", found)
        if isinstance(function, types.FunctionType):  # tools that load edited code put it into the same function
            self._check(f"{self.source.bind(function)}.__code__ is {self.source.bind(function.__code__)}")

    def _bind_type(self, found: Any, _: Any) -> None:
        if hasattr(found, "__dict__") and not isinstance(found, nn.Module):
            self._check(f"{self.source.bind(found)}.__class__ is {self.source.bind(type(found))}")

    def _bind_override(self, found: Any, value: list[Any]) -> None:
        own, name = vars(found), value[0]
        if callable(getattr(type(found), name, None)):
            self._overrides[id(own), name] = (own, name)
        else:  # data of the class, which an instance may hide by its own
            self._check(f"{name!r} not in {self.source.bind(own)}")

    def _bind_length(self, found: Any, value: int) -> None:
        if id(found) not in self._tables:
            self._check(f"len({self.source.bind(found)}) == {value}")

    def _bind_keys(self, found: Any, _: Any) -> None:
        if id(found) not in self._tables:
            self._check(f"(*{self.source.bind(found)},) == {self.source.bind((*found,))}")

    def _bind_contains(self, found: Any, value: list[Any]) -> None:
        if id(found) not in self._tables:
            self._check(f"({value[0]!r} in {self.source.bind(found)}) is {value[1]}")

    def _bind_attribute(self, found: Any, value: list[Any]) -> None:
        self._check(f"{self.source.bind(hasattr)}({self.source.bind(found)}, {value[0]!r}) is {value[1]}")

    def _bind_result(self, found: Any, _: Any) -> None:
        self._check(f"{self.source.bind(found)}() == {self.source.bind(found())}")

    def _follow(self, container: Any, access: tuple[str, Any]) -> Any:
        """One access; its check is noted where it is the first through this place."""
        edge = edge_of(container, access)
        if isinstance(container, nn.Module):
            self._modules[id(container)] = container
            self._tables.add(id(container._modules))
            self._tensor_tables |= {id(container._parameters), id(container._buffers)}
        place = (id(edge.container), edge.kind, edge.key if isinstance(edge.key, str | int) else id(edge.key))
        if place in self._slots:
            return self._slots[place].child
        self._slots[place] = edge
        if not (self._is_swept(edge) or edge.key in _UNCHECKED or id(edge.container) in self._tables):
            comparison = "is" if edge.stable else "=="
            self._check(f"{edge.expression(self.source)} {comparison} {self.source.bind(edge.child)}")
        return edge.child

    def _is_swept(self, edge: Edge) -> bool:
        """A tensor, or a parameter that is None."""
        return isinstance(edge.child, torch.Tensor) or id(edge.container) in self._tensor_tables

    def _build(self) -> Callable[[], bool]:
        source = self.source
        checks = [self._hooks_check(), *self._checks]
        source.lines += [
            "try:",
            f"    return {' and '.join(checks)}",
            "except Exception:",  # something on the way is gone, or of another type
            "    return False",
        ]
        return source.build("guards")

    def _hooks_check(self) -> str:
        """No hook was registered since the tables without any were last seen empty, or they still are."""
        registered, tables = torch_compat.hook_registrations(), self._hooks
        seen = [-1 if any(tables) else registered.next_id]

        def still_empty() -> bool:
            now = registered.next_id
            if any(tables):
                return False
            seen[0] = now
            return True

        bind = self.source.bind
        return f"({bind(registered)}.next_id == {bind(seen)}[0] or {bind(still_empty)}())"
