"""From a step to the descriptor that runs it: FULL before PIECEWISE before NONE, always with a reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache

from rung.graphs.descriptor import Descriptor, GraphMode, Shape, exact, misfit, nearest_misfit, wastes
from rung.graphs.ladder import DEFAULT_MAX_WASTE, check_max_waste
from rung.graphs.planned import ResolvedMode
from rung.graphs.reasons import Reason

REMEMBERED = 4096  # shapes whose decision is kept: the decodes of any runner, and the mixed batches of a while


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision for one step. `reason` says why it is not better than `descriptor.mode`, or BEST."""

    descriptor: Descriptor
    reason: Reason = Reason.BEST
    padding: int = 0  # elements added behind the step's own, over all named dimensions
    counter: str = field(init=False, repr=False, compare=False)  # the name under which the step is counted

    def __post_init__(self) -> None:
        object.__setattr__(self, "counter", f"step.{self.descriptor.mode}.{self.reason}")

    @property
    def mode(self) -> GraphMode:
        return self.descriptor.mode

    @property
    def num_tokens(self) -> int:
        """Tokens, padded."""
        return self.descriptor.num_tokens

    @property
    def num_requests(self) -> int | None:
        """Requests, padded, when the step is a FULL graph: it needs bounds that hold for every batch of the graph. Else None."""
        return self.descriptor.num_requests if self.descriptor.mode is GraphMode.FULL else None

    @property
    def max_query_len(self) -> int | None:
        """Under FULL, the bound that holds for every batch of the graph."""
        descriptor = self.descriptor
        return (descriptor.max_query_len or descriptor.num_tokens) if descriptor.mode is GraphMode.FULL else None


@dataclass(frozen=True, slots=True)
class _Group:
    """Descriptors of one mode and one query length, by preference; `volumes` are theirs."""

    entries: tuple[Descriptor, ...]
    volumes: tuple[int, ...]


class Dispatcher:
    """Chooses among captured descriptors, of any number of dimensions: the one with the least padding that fits.

    `failed` is read at each call, so a capture that fails later is respected; those that stand in `trimmed` too have no graph because of
    the memory budget. A dimension is not padded to more than `max_waste` times its size, except to 8 or fewer; None: as far as the next
    size lies. Decisions are remembered, a step like an earlier one costs a look-up. Raises `LadderError` for a `max_waste` below 1."""

    def __init__(
        self,
        descriptors: Iterable[Descriptor],
        *,
        resolved: ResolvedMode | None = None,
        failed: Set[Descriptor] = frozenset(),
        trimmed: Set[Descriptor] = frozenset(),
        max_waste: float | None = DEFAULT_MAX_WASTE,
    ) -> None:
        self.failed = failed
        self.trimmed = trimmed
        self.max_waste = check_max_waste(max_waste)
        self._resolved = resolved
        self._groups: dict[GraphMode, dict[int | None, _Group]] = {GraphMode.FULL: {}, GraphMode.PIECEWISE: {}}
        ordered = sorted(set(descriptors), key=_preference)
        for mode, groups in self._groups.items():
            for query_len in {d.uniform_query_len for d in ordered if d.mode is mode}:
                entries = tuple(d for d in ordered if d.mode is mode and d.uniform_query_len == query_len)
                groups[query_len] = _Group(entries, tuple(d.volume for d in entries))
        self._remembered_failures = set(failed)
        self._decided = lru_cache(REMEMBERED)(self._decide)

    def dispatch(self, shape: Shape, *, best: GraphMode = GraphMode.FULL) -> Dispatch:
        """The best mode that fits, not better than `best`. A step without a graph keeps its exact sizes."""
        if self._remembered_failures != self.failed:
            self._remembered_failures = set(self.failed)
            self._decided.cache_clear()
        return self._decided(shape, best)

    def _decide(self, shape: Shape, best: GraphMode) -> Dispatch:
        if shape.volume == 0:
            return Dispatch(exact(shape), Reason.EMPTY)
        why: Reason | None = None  # why the first mode with descriptors for such batches does not serve
        for mode, groups in self._groups.items():
            if not groups:
                continue
            if mode.rank > best.rank:
                why = why or Reason.FORCED
                continue
            found = self._find(groups, shape)
            if isinstance(found, Descriptor):
                return Dispatch(found, self._why_not_better(mode, shape, why), found.volume - shape.volume)
            # "No full graph is for such batches" says nothing once a graph that is for them does not serve either.
            why = found if why in (None, Reason.MIXED_BATCH, Reason.QUERY_LENGTH) else why
        return Dispatch(exact(shape), why or self._nothing_planned(best))

    def _find(self, groups: Mapping[int | None, _Group], shape: Shape) -> Descriptor | Reason:
        """The smallest descriptor of one mode that fits, or why none does."""
        reason = Reason.MIXED_BATCH if shape.uniform_query_len is None else Reason.QUERY_LENGTH
        for query_len in dict.fromkeys((shape.uniform_query_len, None)):
            group = groups.get(query_len)
            if group is None:
                continue
            first = bisect_left(group.volumes, shape.volume)  # what fits is no smaller
            fitting = [descriptor for descriptor in group.entries[first:] if misfit(descriptor, shape) is None]
            for descriptor in fitting:
                if descriptor not in self.failed and not wastes(descriptor, shape, self.max_waste):
                    return descriptor
            if not fitting:
                reason = nearest_misfit(group.entries, shape) or reason
            else:
                reason = self._why_without(fitting[0])
        return reason

    def _why_without(self, fitting: Descriptor) -> Reason:
        """Why a descriptor that fits does not serve."""
        if fitting not in self.failed:
            return Reason.PADDING
        return Reason.MEMORY_BUDGET if fitting in self.trimmed else Reason.CAPTURE_FAILED

    def _why_not_better(self, mode: GraphMode, shape: Shape, why: Reason | None) -> Reason:
        """Why a step that found a graph of `mode` has no better one; `why` is what the better modes said."""
        if self._resolved is None:
            return why or Reason.BEST
        if mode is GraphMode.FULL:
            return self._resolved.full_reason
        limit = self._resolved.mixed_reason if shape.uniform_query_len is None else self._resolved.decode_reason
        return limit if limit is not Reason.BEST else why or Reason.BEST

    def _nothing_planned(self, best: GraphMode) -> Reason:
        if best is GraphMode.NONE:
            return Reason.FORCED
        asked_for_none = self._resolved is None or (self._resolved.decode, self._resolved.mixed) == (GraphMode.NONE, GraphMode.NONE)
        return Reason.GRAPHS_OFF if asked_for_none else Reason.NOT_CAPTURED


def _preference(descriptor: Descriptor) -> tuple[int, int, int, int]:
    """Among equal modes: least to compute, then the more special one, fewer requests, fewer adapters."""
    return (
        descriptor.volume,
        descriptor.uniform_query_len is None,
        descriptor.num_requests if descriptor.num_requests is not None else 1 << 60,
        descriptor.adapters,
    )
