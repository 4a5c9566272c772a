"""Follows the address policy of a manager: what is done when tensors that its graphs read lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rung.counters import Count, Counters
from rung.graphs.capturing import Capturing
from rung.graphs.descriptor import Descriptor
from rung.graphs.guard import AddressGuard
from rung.graphs.planned import capture_order


class AddressFollower:
    """Acts on what the guard notices; without one nothing ever moves. `free` frees all graphs and makes their outputs stale. Not
    thread-safe: the manager's lock covers it."""

    def __init__(self, guard: AddressGuard | None, captures: Capturing, counters: Counters, free: Callable[[], None]) -> None:
        self.without_graphs = False  # addresses changed under the policy "none": steps run the plan until graphs are captured again
        self._guard = guard
        self._captures = captures
        self._counters = counters
        self._free = free
        self._rebind_due = False  # addresses were forgotten, so the plan may be bound to what is no longer there

    def know(self) -> None:
        """Bind the plan to what lies there now and take note of it, unless that is known."""
        if self._guard is not None and self._guard.knows_nothing:
            if self._rebind_due and self._guard.addresses.rebind is not None:
                self._guard.addresses.rebind()
            self._rebind_due = False
            self._guard.snapshot()

    def forget(self) -> None:
        """Let the next step or capture take what lies there now for right; the plan is bound to it then."""
        if self._guard is not None:
            self._rebind_due |= not self._guard.knows_nothing
            self._guard.forget()

    def refuse_layouts(self) -> None:
        """Raise `AddressChangedError` when the plan could not take what lies there now."""
        if self._guard is not None:
            self._guard.refuse_layouts(self._guard.moved())

    def follow_all(self) -> bool:
        """Look at everything and follow the policy. True when something had moved."""
        moved = self._guard.moved() if self._guard is not None else []
        self.follow(moved)
        return bool(moved)

    def follow(self, moved: Sequence[str], *, after: Descriptor | None = None) -> None:
        """Raises, or makes the plan read what lies there now and frees the graphs that do not. `after`: a step of that descriptor has run
        already."""
        if not moved:
            return
        assert self._guard is not None
        addresses = self._guard.addresses
        self._guard.refuse(moved, repeatable=after is None or addresses.is_repeatable(after))
        self._counters.add(Count.ADDRESS_CHANGES)
        if addresses.rebind is not None:
            addresses.rebind()
        captured = capture_order(self._captures.programs)
        self._free()
        self._guard.forget()
        self._guard.snapshot()
        self.without_graphs = addresses.on_change == "none"
        if not self.without_graphs:
            self._captures.wanted.at_next_step(captured)
