"""Every combination of the sizes of several dimensions, without listing them: what a wrapped module may capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rung.graphs.descriptor import Descriptor, GraphMode, Shape, exact, misfit, wastes
from rung.graphs.dispatch import REMEMBERED, Dispatch
from rung.graphs.ladder import DEFAULT_MAX_WASTE, Ladder, check_max_waste
from rung.graphs.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One named dimension: padded to the sizes of `ladder`, or exact, at its sizes alone or, without a ladder, at any."""

    name: str
    ladder: Ladder | None = None
    padded: bool = False

    def captured(self, size: int) -> int:
        """The captured size that is tried for `size`; above the top it is the top, which does not fit."""
        if self.ladder is None:
            return size
        return self.ladder.pad_to(size) or self.ladder.top


class Grid:
    """Dispatch over the grid of `axes`, the first of which `Descriptor.num_tokens` counts. The smallest size of each axis makes the
    smallest combination, so one bisect an axis finds it; whether it serves is decided by `misfit` and `wastes`, as for listed descriptors.

    `reason` is that of a step with a graph. Raises `LadderError` for a `max_waste` below 1."""

    def __init__(
        self,
        mode: GraphMode,
        axes: Sequence[Axis],
        *,
        max_waste: float | None = DEFAULT_MAX_WASTE,
        reason: Reason = Reason.BEST,
    ) -> None:
        self.mode = mode
        self.axes = tuple(axes)
        self._reason = reason
        self.max_waste = check_max_waste(max_waste)
        self._order = sorted(range(1, len(self.axes)), key=lambda index: self.axes[index].name)
        self.dispatch = lru_cache(REMEMBERED)(self._decide)

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        """The step of these sizes."""
        others = tuple((self.axes[index].name, sizes[self.axes[index].name]) for index in self._order)
        return Shape(num_tokens=sizes[self.axes[0].name], symbols=others)

    def descriptor(self, sizes: Mapping[str, int]) -> Descriptor:
        """The graph of exactly these sizes."""
        shape = self.shape(sizes)
        return Descriptor(mode=self.mode, num_tokens=shape.num_tokens, symbols=shape.symbols)

    def _decide(self, shape: Shape) -> Dispatch:
        if shape.volume == 0:
            return Dispatch(exact(shape), Reason.EMPTY)
        sizes = {self.axes[0].name: shape.num_tokens, **dict(shape.symbols)}
        target = {axis.name: axis.captured(sizes[axis.name]) for axis in self.axes}
        descriptor = self.descriptor(target)
        reason = misfit(descriptor, shape)
        if reason is None and any(not axis.padded and target[axis.name] != sizes[axis.name] for axis in self.axes):
            reason = Reason.NOT_CAPTURED
        if reason is None and wastes(descriptor, shape, self.max_waste):
            reason = Reason.PADDING
        if reason is not None:
            return Dispatch(exact(shape), reason)
        return Dispatch(descriptor, self._reason, descriptor.volume - shape.volume)
