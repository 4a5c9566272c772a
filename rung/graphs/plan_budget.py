"""The planner's programme under a memory budget, when sizes need different amounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class _Label:
    """A way to serve all sizes up to `index`, which is captured."""

    cost: float
    bytes: int
    index: int
    count: int
    before: _Label | None


def within_budget(table: npt.NDArray[np.float64], count: int, size_bytes: Sequence[int], memory: int, *, bound: float) -> list[int]:
    """As `planner.cheapest`, with the bytes of the chosen sizes at most `memory` together. `bound` is the
    cost of some ladder that fits.

    Exact: it keeps every partial ladder that no other beats in cost, bytes and number of sizes at once. That is a knapsack, so their number
    can grow with the number of different totals of bytes; those that cannot end below the best ladder found so far, or within the budget,
    are dropped on the way."""
    m = len(table)
    rest = _rest(table, count)
    fronts: list[list[_Label]] = [[] for _ in range(m)]  # by index, from fewer sizes
    latest = [_Label(float(table[0, j]), size_bytes[j], j, 1, None) for j in range(m)]
    best: _Label | None = None
    for used in range(1, count + 1):
        kept: list[_Label] = []
        for label in sorted(latest, key=lambda one: (one.index, one.cost, one.bytes)):
            final = label.index == m - 1
            if label.bytes + (0 if final else size_bytes[-1]) > memory:
                continue
            if label.cost + rest[count - used, label.index] > bound * (1 + _TIE) or _is_beaten(label, fronts[label.index]):
                continue
            fronts[label.index].append(label)
            if final:
                if best is None or label.cost < best.cost * (1 - _TIE):
                    best = label
                bound = min(bound, label.cost)
            else:
                kept.append(label)
        latest = [
            _Label(one.cost + float(table[one.index + 1, j]), one.bytes + size_bytes[j], j, used + 1, one)
            for one in kept
            for j in range(one.index + 1, m)
            if used < count and one.cost + table[one.index + 1, j] + rest[count - used - 1, j] <= bound * (1 + _TIE)
        ]
    chosen = []
    while best is not None:
        chosen.append(best.index)
        best = best.before
    return chosen[::-1]


def _is_beaten(label: _Label, front: Sequence[_Label]) -> bool:
    """Whether another label of the same index, with as many sizes or fewer, costs and needs no more."""
    return any(other.cost <= label.cost * (1 + _TIE) and other.bytes <= label.bytes for other in front)


def _rest(table: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """[count, m]: the least cost of what lies behind index j with at most k more sizes, memory aside."""
    m = len(table)
    rest = np.full((count, m), np.inf)
    rest[:, -1] = 0.0
    for k in range(1, count):
        for j in range(m - 1):
            rest[k, j] = min(rest[k - 1, j], float((table[j + 1, j + 1 :] + rest[k - 1, j + 1 :]).min()))
    return rest
