"""What a captured graph is for, what a step looks like, and the one predicate between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from math import prod
from typing import NamedTuple

from rung.graphs.ladder import too_wasteful
from rung.graphs.reasons import Reason


class GraphMode(StrEnum):
    """How one step runs."""

    NONE = "none"  # the stitched plan, no graph
    PIECEWISE = "piecewise"  # a graph for what lies between two breaks, which run on the host
    FULL = "full"  # one graph for the whole step, but for breaks that decide on the host

    @property
    def rank(self) -> ModeRank:
        return ModeRank[self.name]


class ModeRank(IntEnum):
    """Modes by preference, a higher value is preferred."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class ConfiguredMode(StrEnum):
    """What a user asks for; resolved against the attention backend into a mode for decode batches and one for mixed batches."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"

    @property
    def decode(self) -> GraphMode:
        """The mode asked for uniform decode batches."""
        if self is ConfiguredMode.NONE:
            return GraphMode.NONE
        return GraphMode.PIECEWISE if self is ConfiguredMode.PIECEWISE else GraphMode.FULL

    @property
    def mixed(self) -> GraphMode:
        """The mode asked for all other batches."""
        if self is ConfiguredMode.FULL:
            return GraphMode.FULL
        return GraphMode.PIECEWISE if self in (ConfiguredMode.PIECEWISE, ConfiguredMode.FULL_AND_PIECEWISE) else GraphMode.NONE


class Shape(NamedTuple):
    """What a step is about to run. A module that serves no requests leaves everything but `num_tokens` (its first named dimension) and
    `symbols` (the others) alone. A tuple, since one is made and looked up in every step; build it with keywords."""

    num_tokens: int
    num_requests: int | None = None
    uniform_query_len: int | None = None  # query tokens of every request when they all have the same number, else None
    max_query_len: int | None = None
    adapters: int = 0  # distinct active adapters
    variant: str = ""
    symbols: tuple[tuple[str, int], ...] = ()  # further named dimensions, sorted by name

    @property
    def volume(self) -> int:
        """Elements over all named dimensions: what padding is counted in."""
        return self.num_tokens * prod(size for _, size in self.symbols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """One captured (or capturable) case. None means: not a condition. Under NONE the sizes are the step's own, unpadded."""

    mode: GraphMode
    num_tokens: int
    num_requests: int | None = None
    uniform_query_len: int | None = None
    max_query_len: int | None = None
    adapters: int = 0
    variant: str = ""
    symbols: tuple[tuple[str, int], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)  # looked up in every step, so it is computed once

    def __post_init__(self) -> None:
        conditions = (self.num_requests, self.uniform_query_len, self.max_query_len, self.adapters, self.variant, self.symbols)
        object.__setattr__(self, "_hash", hash((self.mode, self.num_tokens, conditions)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def volume(self) -> int:
        """Elements over all named dimensions."""
        return self.num_tokens * prod(size for _, size in self.symbols)

    def sizes(self, dim: str) -> Mapping[str, int]:
        """The size of every named dimension; `dim` is the name of the one that `num_tokens` counts."""
        return {dim: self.num_tokens, **dict(self.symbols)}

    def __str__(self) -> str:
        parts = [str(self.mode), f"{self.num_tokens} tokens"]
        if self.num_requests is not None:
            parts.append(f"{self.num_requests} requests")
        if self.uniform_query_len is not None:
            parts.append(f"query length {self.uniform_query_len}")
        parts += [f"{name}={size}" for name, size in self.symbols]
        return ", ".join(parts)


def misfit(descriptor: Descriptor, shape: Shape) -> Reason | None:
    """The first condition of `descriptor` that `shape` does not meet, None when the step can run in it after padding. The one predicate:
    nothing else decides whether a graph serves a step."""
    if descriptor.variant != shape.variant:
        return Reason.VARIANT
    if descriptor.adapters < shape.adapters or bool(descriptor.adapters) != bool(shape.adapters):
        return Reason.ADAPTERS
    if descriptor.uniform_query_len is not None and descriptor.uniform_query_len != shape.uniform_query_len:
        return Reason.MIXED_BATCH if shape.uniform_query_len is None else Reason.QUERY_LENGTH
    if descriptor.max_query_len is not None and (shape.max_query_len is None or shape.max_query_len > descriptor.max_query_len):
        return Reason.QUERY_LENGTH
    if descriptor.num_requests is not None and (shape.num_requests is None or shape.num_requests > descriptor.num_requests):
        return Reason.TOO_MANY_REQUESTS
    if shape.num_tokens > descriptor.num_tokens:
        return Reason.TOO_MANY_TOKENS
    if descriptor.symbols != shape.symbols and not _symbols_fit(dict(descriptor.symbols), dict(shape.symbols)):
        return Reason.OTHER_DIMENSION
    return None


_ORDER = (  # of the conditions in `misfit`
    *(Reason.VARIANT, Reason.ADAPTERS, Reason.MIXED_BATCH, Reason.QUERY_LENGTH),
    *(Reason.TOO_MANY_REQUESTS, Reason.TOO_MANY_TOKENS, Reason.OTHER_DIMENSION),
)


def nearest_misfit(descriptors: Iterable[Descriptor], shape: Shape) -> Reason | None:
    """Of descriptors none of which fits, what the one that meets the most conditions lacks."""
    return max((why for one in descriptors if (why := misfit(one, shape)) is not None), key=_ORDER.index, default=None)


def wastes(descriptor: Descriptor, shape: Shape, max_waste: float | None) -> bool:
    """Whether a dimension would be padded beyond the cap. Each is capped by itself, as each has a ladder of its own."""
    if too_wasteful(shape.num_tokens, descriptor.num_tokens, max_waste):
        return True
    return any(too_wasteful(size, padded, max_waste) for (_, padded), (_, size) in zip(descriptor.symbols, shape.symbols, strict=True))


def exact(shape: Shape) -> Descriptor:
    """The descriptor of a step without a graph: its own sizes, nothing padded."""
    return Descriptor(
        mode=GraphMode.NONE,
        num_tokens=shape.num_tokens,
        num_requests=shape.num_requests,
        uniform_query_len=shape.uniform_query_len,
        max_query_len=shape.max_query_len,
        adapters=shape.adapters,
        variant=shape.variant,
        symbols=shape.symbols,
    )


def _symbols_fit(captured: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    return captured.keys() == wanted.keys() and all(wanted[name] <= size for name, size in captured.items())
