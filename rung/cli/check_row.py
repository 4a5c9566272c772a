"""One row of `rung verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rung.graphs.verify import Difference, relative_error
from rung.graphs.verify_pieces import PieceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A mode at a size on one data set. `bits` says how a graph compared with its plan at the padded size: None when it was not asked."""

    size: int
    mode: str
    data: int
    rows: int  # without padding
    error: float = 0.0  # relative, against the module without rung
    tolerance: float = 0.0
    bits: bool | None = None
    step: str = ""  # the first piece or break that differs
    what: str = ""  # how it differs, or why it did not run
    ran: bool = True

    @property
    def passed(self) -> bool:
        return self.bits is not False and self.error <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "error": self.error if self.error < float("inf") else "inf", "passed": self.passed}

    @property
    def verdict(self) -> str:
        if not self.ran:
            return f"not run: {self.what}"
        if self.passed:
            return "ok"
        return f"DIFFERS in {self.step}: {self.what}" if self.step else f"DIFFERS: {self.what or 'beyond the tolerance'}"


def error_of(got: Sequence[Any], want: Sequence[Any]) -> float:
    """The largest relative error among the outputs, infinity when their numbers differ."""
    if len(got) != len(want):
        return float("inf")
    return max((relative_error(mine, other) for mine, other in zip(got, want, strict=True)), default=0.0)


def piece_checks(errors: Sequence[PieceError], **fields: Any) -> Iterator[Check]:
    """The rows of unique pieces, compiled against traced."""
    for piece in errors:
        times = "" if piece.uses == 1 else f" x{piece.uses}"
        yield Check(mode=f"{piece.step}{times}", error=piece.error, **{**fields, "tolerance": piece.tolerance})


def graph_check(difference: Difference | None, **fields: Any) -> Check:
    """The row of a graph."""
    if difference is None:
        return Check(bits=True, **fields)
    return Check(bits=False, step=difference.step, what=difference.what, **fields)


def rows_of(sizes: Sequence[int], size: int, data: int) -> int:
    """Real rows of a data set: the whole size, and for every other set one row less where that still pads to it."""
    below = max((other for other in sizes if other < size), default=0)
    return size - 1 if data % 2 and size - 1 > below else size
