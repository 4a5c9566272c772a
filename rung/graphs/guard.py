"""Notices that tensors which graphs read lie elsewhere now, by looking at a part of them behind each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rung.compile.compiled import CompiledFunction
from rung.compile.paths import Path
from rung.config import AddressPolicy
from rung.errors import AddressChangedError
from rung.graphs.buffers import StaticBuffer
from rung.graphs.descriptor import Descriptor

Read = Callable[[], object]
Watched = Callable[[], Iterable[tuple[str, Read]]]  # names, and how to read what bears them now; walked again for a complete check
Place = tuple[Any, ...]  # address, shape, strides, dtype, device; empty for what is no tensor

PART = 64  # tensors and submodules looked at in a step: about 15 us on the host, while the device works
_STATIC = "static input "
_SHOWN = 4  # names in a message
_ALIGNMENT = 16  # bytes; compiled code may use vector loads where an address was aligned when it was traced


def module_tensors(module: nn.Module) -> Iterator[tuple[str, Read]]:
    """Parameters and buffers by their names in `state_dict` (tied ones under each name), and the submodules that hold them."""
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for table in (submodule._parameters, submodule._buffers, submodule._modules):
            for key, value in table.items():
                if value is not None:
                    yield f"{prefix}.{key}" if prefix else key, partial(table.get, key)


def other_tensors(compiled: CompiledFunction, owner: object) -> Iterator[tuple[str, Read]]:
    """What the plan reads of its owner besides: tensors that are plain attributes, or lie in other objects."""
    for number in compiled.weights:
        path = compiled.plan.inputs[number]
        if not any(key in ("_parameters", "_buffers") for _, key in path.accesses):
            yield path.dotted(), partial(_at, path, {path.local: owner})


def _at(path: Path, owner: Mapping[str, object]) -> object:
    try:
        return path.resolve(owner)
    except (KeyError, AttributeError, IndexError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """What a manager watches and what it does when something moved.

    "raise": `AddressChangedError`, and no graph runs until everything lies where it lay or the graphs are captured again. "recapture": the
    step is run again through new graphs, the others are captured at their next step. "none": the steps run without graphs. `rebind` makes
    the plan read the module's tensors anew. `before_replay`: look at everything before each replay, not at a part behind it. Plans that
    update state need it: a replay on old addresses could not be repeated. Writing the same KV-cache rows twice is no such state. A step
    that is not `is_repeatable` raises whatever the policy when a change is seen behind it, unless `weights_changed` came first."""

    watched: Watched
    on_change: AddressPolicy = "raise"
    rebind: Callable[[], None] | None = None
    before_replay: bool = False
    part: int = PART
    is_repeatable: Callable[[Descriptor], bool] = lambda descriptor: True  # whether running a step of it twice is like running it once


class AddressGuard:
    """Remembers where tensors lie at capture. Holds their storages, so that their addresses are given to nobody else and a stale graph
    never reads freed memory. Not thread-safe: the manager's lock covers it."""

    def __init__(self, addresses: Addresses, inputs: Sequence[Any] = ()) -> None:
        self.addresses = addresses
        self._inputs = tuple(inputs)  # static buffers are watched too
        self._places: dict[str, Place] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._ties: dict[str, str] = {}  # name -> first name of the same tensor
        self._entries: list[tuple[Read, object, int]] = []  # what a sweep looks at: reader, object, address or 0
        self._canary: list[tuple[Read, object, int]] = []  # one tensor that every sweep looks at: conversions of a module move them all
        self._next = 0
        self.suspect = False  # something had moved when last looked

    @property
    def knows_nothing(self) -> bool:
        return not self._places

    def snapshot(self) -> None:
        """Remember where everything lies now; what is known already stays, because older graphs read it there."""
        first: dict[int, str] = {}
        for name, value in self._now():
            if isinstance(value, torch.Tensor) and name not in self._places:
                self._places[name] = _place(value)
                self._held[name] = value.detach()
                self._ties[name] = first.setdefault(id(value), name)
        self._refresh()

    def forget(self) -> None:
        """Nothing is captured any more."""
        self._places.clear()
        self._held.clear()
        self._ties.clear()
        self._entries, self._canary = [], []
        self.suspect = False

    def sweep(self, *, everything: bool = False) -> list[str]:
        """Look at the next part (or at everything) by identity and address, and closely when that shows a difference. Names what moved."""
        start, stop = (0, None) if everything else (self._next, self._next + self.addresses.part)
        self._next = 0 if stop is None or stop >= len(self._entries) else stop
        for read, seen, address in (*self._canary, *self._entries[start:stop]):
            value = read()
            if value is not seen or (address and value.data_ptr() != address):  # type: ignore[attr-defined]
                return self.moved()
        return self.moved() if self.suspect else []

    def moved(self) -> list[str]:
        """The names whose address or layout is no longer the captured one, or that are gone."""
        now = dict(self._now())
        moved = [name for name, place in self._places.items() if _place(now.get(name)) != place]
        self.suspect = bool(moved)
        if not moved:
            self._refresh()  # other objects over the same memory
        return moved

    def refuse_layouts(self, moved: Sequence[str]) -> None:
        """Raise `AddressChangedError` when the plan could not take what lies there now."""
        why_not = self._why_not_rebind(moved)
        if why_not:
            raise AddressChangedError(
                f"{why_not}: the code was made for what was there when it was traced",
                hint="put back what was there, or build the runner (wrap the module) again",
                names=moved,
            )

    def refuse(self, moved: Sequence[str], *, repeatable: bool = True) -> None:
        """Raise `AddressChangedError` when the policy says so, or when the plan could not take what lies there now."""
        self.refuse_layouts(moved)
        if self.addresses.on_change == "raise" or not repeatable:
            shown = ", ".join(map(repr, moved[:_SHOWN])) + (f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else "")
            raise AddressChangedError(
                f"not where they were at capture: {shown}; graphs would read the old values",
                hint='write new values in place (copy_), capture again, or pass on_address_change="recapture"'
                if repeatable
                else "the step has advanced the requests: call weights_changed() between replacing a tensor and the next step",
                names=moved,
            )

    def _why_not_rebind(self, moved: Sequence[str]) -> str:
        """Why the plan cannot take what lies there now, or an empty text: its code was made for layouts, and for the ties of then."""
        now = dict(self._now())
        if any(name.startswith(_STATIC) for name in moved):
            return f"{next(name for name in moved if name.startswith(_STATIC))} was replaced"
        for name in moved:
            value, place = now.get(name), self._places[name]
            if not isinstance(value, torch.Tensor):
                return f"{name!r} is gone"
            if _place(value)[1:] != place[1:] or (value.data_ptr() % _ALIGNMENT and not place[0] % _ALIGNMENT):
                return f"{name!r} has another layout, type, device or alignment"
            if now.get(self._ties[name]) is not value:
                return f"{name!r} is no longer tied to {self._ties[name]!r}"
        return ""

    def _watched(self) -> Iterator[tuple[str, Read]]:
        yield from self.addresses.watched()
        for value in self._inputs:
            if isinstance(value, StaticBuffer):
                yield f"{_STATIC}{value.name}", partial(getattr, value, "storage")

    def _now(self) -> Iterator[tuple[str, object]]:
        return ((name, read()) for name, read in self._watched())

    def _refresh(self) -> None:
        found = [(read, read()) for _, read in self._watched()]
        self._entries = [(read, value, value.data_ptr() if isinstance(value, torch.Tensor) else 0) for read, value in found]
        self._canary = [entry for entry in self._entries if entry[2]][:1]


def _place(value: object) -> Place:
    """Address, shape, strides, dtype and device. An address is taken as a number: a storage that was resized has another one."""
    if not isinstance(value, torch.Tensor):
        return ()
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
