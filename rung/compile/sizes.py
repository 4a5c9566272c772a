"""Sizes and ranges of the dynamic dimension that have code of their own, and which of them a size belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SizeRange:
    """`low` to `high`, both within."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @staticmethod
    def of(given: int | Sequence[int]) -> SizeRange:
        """A size, or (low, high)."""
        return SizeRange(given, given) if isinstance(given, int) else SizeRange(*given)


class SizeTable:
    """Finds the narrowest of some ranges that a size lies in, by bisection."""

    def __init__(self, ranges: Iterable[SizeRange]) -> None:
        ordered = sorted(ranges, key=lambda one: one.high - one.low)  # the first that fits is the narrowest
        self._starts = sorted({edge for one in ordered for edge in (one.low, one.high + 1)})
        self._found = [next((one for one in ordered if one.low <= start <= one.high), None) for start in self._starts]

    def find(self, size: int) -> SizeRange | None:
        at = bisect_right(self._starts, size) - 1
        return None if at < 0 else self._found[at]
