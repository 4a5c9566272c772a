"""The sizes for which graphs are captured, and the way from a size to the next captured one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rung.errors import LadderError

DEFAULT_TOP = 512  # no default ladder goes higher without being asked
DEFAULT_MAX_WASTE = 2.0  # a step is padded to at most so many times its own size
FREE_PADDING = 8  # up to here a padded step costs what a small one does, so it may be padded further


def series(cap: int) -> tuple[int, ...]:
    """The raw series up to `cap`: 1, 2, 4, then every 8 below 256, then every 16."""
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, cap + 1, 16)) if size <= cap)


def ladder_cap(max_num_requests: int, decode_query_len: int = 1, top: int = DEFAULT_TOP) -> int:
    """The largest size worth capturing for a decoder: twice the tokens of a full decode batch, at most `top`."""
    return min(max_num_requests * decode_query_len * 2, top)


def too_wasteful(size: int, padded: int, max_waste: float | None = DEFAULT_MAX_WASTE) -> bool:
    """Whether padding `size` rows to `padded` exceeds the waste cap; None is no cap. Padding to 8 rows or fewer never does."""
    return max_waste is not None and padded > FREE_PADDING and padded > max_waste * size


def check_max_waste(max_waste: float | None) -> float | None:
    """The cap itself. Raises `LadderError` for one below 1, which no step could keep."""
    if max_waste is not None and not max_waste >= 1.0:
        raise LadderError(
            f"max_waste is {max_waste!r}, expected a factor >= 1", hint="2.0 pads a step to at most twice its size; None: any"
        )
    return max_waste


@dataclass(frozen=True, slots=True)
class Ladder:
    """Sorted, unique capture sizes. Empty: nothing is captured."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.sizes) != sorted(set(self.sizes)):
            raise LadderError(f"the sizes {list(self.sizes)} are not sorted and unique", hint="use Ladder.custom, which sorts")

    @classmethod
    def up_to(cls, maximum: int) -> Ladder:
        """The series with `maximum` appended when the series lacks it. `maximum` 0 gives an empty ladder."""
        _check_size(maximum, "maximum", lowest=0)
        return cls.custom(series(maximum), maximum) if maximum else cls(())

    @classmethod
    def for_requests(cls, max_num_requests: int, *, decode_query_len: int = 1, max_num_tokens: int | None = None) -> Ladder:
        """The default ladder of a decoder: the series up to its cap, nothing above the token budget `max_num_tokens`."""
        cap = ladder_cap(max_num_requests, decode_query_len)
        return cls.up_to(cap if max_num_tokens is None else min(cap, max_num_tokens))

    @classmethod
    def custom(cls, sizes: Iterable[int], maximum: int | None = None, *, append: bool = True) -> Ladder:
        """A user's list in any order, duplicates allowed; `maximum` (the largest size that will ever come) is appended when missing, unless
        `append` is off.

        Raises `LadderError` naming the entry that is no positive integer or lies above `maximum`."""
        entries = list(sizes)
        for index, entry in enumerate(entries):
            _check_size(entry, f"entry {index}")
            if maximum is not None and entry > maximum:
                raise LadderError(
                    f"entry {index} of the ladder is {entry}, above the maximum {maximum}", hint="drop the entry or raise the maximum"
                )
        if maximum is not None and append:
            entries.append(_check_size(maximum, "maximum"))
        return cls(tuple(sorted(set(entries))))

    @property
    def top(self) -> int:
        """The largest size, 0 for an empty ladder."""
        return self.sizes[-1] if self.sizes else 0

    def pad_to(self, size: int) -> int | None:
        """The smallest entry >= `size`, None above the top."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def waste(self, size: int) -> float:
        """The share of padded rows when `size` rows run, 0 when nothing is captured for them."""
        padded = self.pad_to(size)
        return (padded - size) / padded if padded else 0.0

    def trimmed(self, count: int) -> Ladder:
        """At most `count` (>= 1) sizes, the top among them: drops again and again the entry whose loss adds the fewest padded rows."""
        _check_size(count, "count")
        sizes = list(self.sizes)
        while len(sizes) > count:
            sizes.pop(min(range(len(sizes) - 1), key=lambda i: _rows_added_without(sizes, i)))
        return Ladder(tuple(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)


def _rows_added_without(sizes: Sequence[int], index: int) -> int:
    """Padded rows added, over one step of each size, when entry `index` goes and its steps move to the next entry."""
    below = sizes[index - 1] if index else 0
    return (sizes[index] - below) * (sizes[index + 1] - sizes[index])


def _check_size(value: object, name: str, lowest: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise LadderError(f"{name} of the ladder is {value!r}, expected an integer >= {lowest}", hint="give positive token counts")
    return value
