"""What a manager was asked to capture: the part of its life that outlasts the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rung.errors import CaptureError, StateError
from rung.graphs.descriptor import Descriptor

Prepare = Callable[[Descriptor], AbstractContextManager[Any]]


def nothing_to_prepare(descriptor: Descriptor) -> AbstractContextManager[Any]:
    return nullcontext()


class Wanted:
    """How to prepare for each descriptor, which ones wait for their first step, and which ones `suspend` put away.

    Not thread-safe: the manager's lock covers it."""

    def __init__(self) -> None:
        self._prepare: dict[Descriptor, Prepare] = {}
        self._lazy: set[Descriptor] = set()
        self._suspended: tuple[Descriptor, ...] | None = None

    @property
    def is_suspended(self) -> bool:
        return self._suspended is not None

    @property
    def suspended(self) -> tuple[Descriptor, ...]:
        """What was captured when the graphs were put away."""
        return self._suspended or ()

    def add(self, descriptors: Iterable[Descriptor], prepare: Prepare, *, lazy: bool) -> None:
        for descriptor in descriptors:
            self._prepare[descriptor] = prepare
            if lazy:
                self._lazy.add(descriptor)

    def at_next_step(self, descriptors: Iterable[Descriptor]) -> None:
        """Let the next step of each capture it, prepared as before."""
        self._lazy.update(descriptors)

    def prepare(self, descriptor: Descriptor) -> AbstractContextManager[Any]:
        return self._prepare.get(descriptor, nothing_to_prepare)(descriptor)

    def captured(self, descriptor: Descriptor) -> None:
        self._lazy.discard(descriptor)

    def check_lazy(self, descriptor: Descriptor) -> None:
        """Raise unless the first step of `descriptor` may capture it."""
        if self.is_suspended:
            raise StateError(
                f"the graphs are suspended, and a step asked for ({descriptor})",
                hint="call resume() first, or run the step without a graph",
            )
        if descriptor not in self._lazy:
            raise CaptureError(
                f"no graph was captured for ({descriptor})",
                hint="dispatch among the descriptors that were captured, and respect `manager.failed`",
                size=descriptor.num_tokens,
            )

    def put_away(self, captured: tuple[Descriptor, ...]) -> None:
        if self._suspended is None:
            self._suspended = captured

    def take_back(self) -> tuple[Descriptor, ...]:
        """What to capture again; nothing is suspended any more."""
        descriptors, self._suspended = self.suspended, None
        return descriptors

    def forget(self) -> None:
        self._prepare.clear()
        self._lazy.clear()
        self._suspended = None
