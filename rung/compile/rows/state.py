"""What a traced value knows about the rows of one dynamic dimension, and why it may know nothing good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

Kind = Literal["mixes", "unknown"]
Extent = Any  # a size: an int, or a sympy expression over the sizes of the trace


class Refusal(Exception):  # noqa: N818 - a signal between a rule and the walk, not an error of the user
    """Raised by a rule: the op does not keep rows apart, or it cannot be shown to."""

    def __init__(self, kind: Kind, why: str) -> None:
        super().__init__(why)
        self.kind: Kind = kind
        self.why = why


def mixes(why: str) -> Refusal:
    return Refusal("mixes", why)


def unknown(why: str) -> Refusal:
    return Refusal("unknown", why)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why rows are not proved independent, by the first operation at fault."""

    kind: Kind
    op: str  # as the user wrote it, with the ATen op behind it
    place: str  # " at file:line (code)" of the user's code, or empty
    node: str  # name in the traced graph
    why: str

    def to_json(self) -> list[str]:
        return [self.kind, self.op, self.place, self.node, self.why]

    @staticmethod
    def from_json(data: Sequence[str]) -> Verdict:
        kind: Kind = "mixes" if data[0] == "mixes" else "unknown"
        return Verdict(kind, *data[1:])

    def __str__(self) -> str:
        return f"{self.op} (node {self.node}){self.place}: {self.why}"


Verdicts = Mapping[str, Verdict | None]  # dynamic dimension -> None when its rows are proved independent


@dataclass(frozen=True, slots=True)
class Axis:
    """Row r lies at the indices (o * rows + r) * inner + j of dimension `dim`, for o < outer and j < inner.

    `outer` and `inner` are 1 unless a reshape merged the rows with other dimensions. `step` is k for a tensor whose row r holds k * r."""

    dim: int
    outer: Extent = 1
    inner: Extent = 1
    step: Extent | None = field(default=None, compare=False)

    def at(self, dim: int) -> Axis:
        """The same rows along another dimension."""
        return Axis(dim, self.outer, self.inner)

    @property
    def is_plain(self) -> bool:
        """Whether the dimension counts rows and nothing else."""
        return bool(self.outer == 1) and bool(self.inner == 1)


State = Axis | Verdict | None  # None: the value neither has rows nor depends on them


def ratio(a: Extent, b: Extent) -> Extent | None:
    """a / b when that is an integer for all sizes, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if b == 0:
        return None
    quotient = a / b
    return quotient if quotient.is_integer else None


def reshaped(axis: Axis, old: Sequence[Extent], new: Sequence[Extent], rows: Extent) -> Axis:
    """Where rows go when a tensor of shape `old` is seen, in the same order of elements, as `new`. Raises `Refusal`."""
    before = prod(old[: axis.dim]) * axis.outer
    behind = axis.inner * prod(old[axis.dim + 1 :])
    for dim, extent in enumerate(new):
        if rows not in getattr(extent, "free_symbols", ()):
            continue
        outer, inner = ratio(before, prod(new[:dim])), ratio(behind, prod(new[dim + 1 :]))
        if outer is not None and inner is not None and outer * rows * inner == extent:
            return Axis(dim, outer, inner)
    raise unknown(f"the reshape from {list(old)} to {list(new)} does not keep rows in one dimension")
