"""What passes did to a piece, and what they almost did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A place where a pattern fitted in part. `reason` is the first thing that differs, where the most nodes fitted."""

    pattern: str
    anchor: str  # the node where the pattern's output would be
    matched: int  # operations of the pattern that fitted
    total: int
    reason: str
    where: str = ""  # the line of user code behind the anchor

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.pattern} fitted {self.matched} of {self.total} operations up to {self.anchor}{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """Matches by pattern, and near misses, of one run of a pass over one graph."""

    matches: Mapping[str, int]
    near_misses: tuple[NearMiss, ...] = ()


def merged(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several counts."""
    total: dict[str, int] = {}
    for item in counts:
        for name, count in item.items():
            total[name] = total.get(name, 0) + count
    return total
