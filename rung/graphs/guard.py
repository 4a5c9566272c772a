"""Notices that tensors which graphs read lie elsewhere now."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rung.errors import AddressChangedError

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class AddressGuard:
    """Remembers the addresses of named tensors at capture. Holds their storages, so that a stale graph never reads freed memory."""

    def __init__(self, named: NamedTensors) -> None:
        self._named = named
        self._known: dict[str, torch.Tensor] = {}

    def snapshot(self) -> None:
        """Remember where everything lies now; what is known already stays, because older graphs read it there."""
        for name, tensor in self._named():
            self._known.setdefault(name, tensor.detach())

    def forget(self) -> None:
        """Nothing is captured any more."""
        self._known.clear()

    def moved(self) -> list[str]:
        """The names whose address or layout is no longer the captured one, or that are gone."""
        now = dict(self._named())
        return [name for name, then in self._known.items() if name not in now or not _same_place(now[name], then)]

    def check(self) -> None:
        """Raise `AddressChangedError` naming what moved."""
        moved = self.moved()
        if moved:
            more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
            raise AddressChangedError(
                f"{moved[0]!r}{more} lies at another address than at capture: graphs would read the old values",
                hint="write new values in place (copy_), or release the graphs and capture again",
            )


def _same_place(now: torch.Tensor, then: torch.Tensor) -> bool:
    return (now.data_ptr(), now.shape, now.stride(), now.dtype, now.device) == (
        then.data_ptr(),
        then.shape,
        then.stride(),
        then.dtype,
        then.device,
    )
