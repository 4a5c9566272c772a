"""From a step to the descriptor that runs it: FULL before PIECEWISE before NONE, always with a reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from rung.attention.base import CaptureSupport
from rung.graphs.descriptor import ConfiguredMode, Descriptor, GraphMode, Shape, exact, misfit
from rung.graphs.ladder import DEFAULT_MAX_WASTE, Ladder, check_max_waste, too_wasteful
from rung.graphs.reasons import Reason


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision for one step. `reason` says why it is not better than `descriptor.mode`, or BEST."""

    descriptor: Descriptor
    reason: Reason
    padding: int = 0  # rows added behind the step's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedMode:
    """What holds after the attention backend was asked, for uniform decode batches and for all others."""

    decode: GraphMode
    mixed: GraphMode
    decode_reason: Reason = Reason.BEST  # why `decode` is not what was asked
    mixed_reason: Reason = Reason.BEST


def resolve_mode(mode: ConfiguredMode, support: CaptureSupport = CaptureSupport.ALWAYS, uniform_query_len: int = 1) -> ResolvedMode:
    """Limit the configured mode by what the attention backend can capture; what is lost becomes PIECEWISE with a reason."""
    needed = CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE if uniform_query_len == 1 else CaptureSupport.UNIFORM_BATCH
    decode_lost = mode.decode is GraphMode.FULL and support < needed
    mixed_lost = mode.mixed is GraphMode.FULL and support < CaptureSupport.ALWAYS
    return ResolvedMode(
        decode=GraphMode.PIECEWISE if decode_lost else mode.decode,
        mixed=GraphMode.PIECEWISE if mixed_lost else mode.mixed,
        decode_reason=Reason.BACKEND_LIMIT if decode_lost else Reason.BEST,
        mixed_reason=Reason.BACKEND_LIMIT if mixed_lost else Reason.BEST,
    )


def plan_descriptors(
    ladder: Ladder,
    mode: ConfiguredMode,
    *,
    max_num_requests: int | None = None,
    uniform_query_len: int = 1,
    capture_support: CaptureSupport = CaptureSupport.ALWAYS,
    adapters: int = 0,
    variant: str = "",
) -> tuple[Descriptor, ...]:
    """All descriptors to capture, in capture order.

    PIECEWISE for every size. FULL for uniform decode up to `max_num_requests` requests, whose number is a size of its own, so that the
    largest decode batch has a graph. FULL without conditions for mixed batches when the backend reads lengths on the device and FULL was
    asked for all, and for modules without requests (`max_num_requests` None)."""
    resolved = resolve_mode(mode, capture_support, uniform_query_len)
    planned: list[Descriptor] = []
    if GraphMode.PIECEWISE in (resolved.decode, resolved.mixed):
        planned += [Descriptor(mode=GraphMode.PIECEWISE, num_tokens=size, adapters=adapters, variant=variant) for size in ladder]
    if max_num_requests is None:
        if resolved.decode is GraphMode.FULL:
            planned += [Descriptor(mode=GraphMode.FULL, num_tokens=size, adapters=adapters, variant=variant) for size in ladder]
        return capture_order(planned)
    if resolved.decode is GraphMode.FULL:
        planned += [
            Descriptor(
                mode=GraphMode.FULL,
                num_tokens=requests * uniform_query_len,
                num_requests=requests,
                uniform_query_len=uniform_query_len,
                max_query_len=uniform_query_len,
                adapters=adapters,
                variant=variant,
            )
            for requests in _request_sizes(ladder, max_num_requests, uniform_query_len)
        ]
    if resolved.mixed is GraphMode.FULL:
        planned += [
            Descriptor(mode=GraphMode.FULL, num_tokens=size, num_requests=min(size, max_num_requests), adapters=adapters, variant=variant)
            for size in ladder
        ]
    return capture_order(planned)


def capture_order(descriptors: Iterable[Descriptor]) -> tuple[Descriptor, ...]:
    """PIECEWISE before FULL, the largest first, so that smaller graphs reuse the memory of larger ones."""
    return tuple(sorted(descriptors, key=lambda d: (d.mode.rank, -d.num_tokens, -(d.num_requests or 0), d.uniform_query_len is None)))


@dataclass(frozen=True, slots=True)
class _Group:
    """Descriptors of one mode and one query length, by preference; `sizes` are their numbers of tokens."""

    entries: tuple[Descriptor, ...]
    sizes: tuple[int, ...]


class Dispatcher:
    """Chooses among captured descriptors. `failed` is read at each call, so a capture that fails later is respected; those of them that
    also stand in `trimmed` have no graph because of the memory budget.

    A step is not padded to more than `max_waste` times its tokens, except to 8 tokens or fewer; None: as far as the next size lies.
    Raises `LadderError` for a `max_waste` below 1."""

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
                groups[query_len] = _Group(entries, tuple(d.num_tokens for d in entries))

    def dispatch(self, shape: Shape, *, best: GraphMode = GraphMode.FULL) -> Dispatch:
        """The best mode that fits, not better than `best`. A step without a graph keeps its exact sizes."""
        if shape.num_tokens == 0:
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
                limit = Reason.BEST if mode is GraphMode.FULL else self._limit(shape)
                reason = limit if limit is not Reason.BEST else why or Reason.BEST
                return Dispatch(found, reason, found.num_tokens - shape.num_tokens)
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
            for descriptor in group.entries[bisect_left(group.sizes, shape.num_tokens) :]:
                if misfit(descriptor, shape) is not None or descriptor in self.failed:
                    continue
                if too_wasteful(shape.num_tokens, descriptor.num_tokens, self.max_waste):
                    break  # later ones are larger
                return descriptor
            reason = self._why_not(group, shape)
        return reason

    def _why_not(self, group: _Group, shape: Shape) -> Reason:
        """Why no descriptor of the group serves: none fits, those that do failed, or the first that is left wastes too much."""
        fitting = [d for d in group.entries[bisect_left(group.sizes, shape.num_tokens) :] if misfit(d, shape) is None]
        if not fitting:
            return misfit(group.entries[-1], shape) or Reason.CAPTURE_FAILED
        if fitting[0] in self.failed:
            return Reason.MEMORY_BUDGET if fitting[0] in self.trimmed else Reason.CAPTURE_FAILED
        return Reason.PADDING

    def _limit(self, shape: Shape) -> Reason:
        """Why FULL was not planned for such a batch although it was asked for."""
        if self._resolved is None:
            return Reason.BEST
        return self._resolved.mixed_reason if shape.uniform_query_len is None else self._resolved.decode_reason

    def _nothing_planned(self, best: GraphMode) -> Reason:
        if best is GraphMode.NONE:
            return Reason.FORCED
        asked_for_none = self._resolved is None or (self._resolved.decode, self._resolved.mixed) == (GraphMode.NONE, GraphMode.NONE)
        return Reason.GRAPHS_OFF if asked_for_none else Reason.NOT_CAPTURED


def _preference(descriptor: Descriptor) -> tuple[int, int, int, int]:
    """Among equal modes: fewer tokens, then the more special one, fewer requests, fewer adapters."""
    return (
        descriptor.num_tokens,
        descriptor.uniform_query_len is None,
        descriptor.num_requests if descriptor.num_requests is not None else 1 << 60,
        descriptor.adapters,
    )


def _request_sizes(ladder: Ladder, max_num_requests: int, query_len: int) -> list[int]:
    """Numbers of requests with a FULL decode graph: each ladder size rounded up to whole requests, the maximum among them."""
    wanted = {min(-(-size // query_len), max_num_requests) for size in ladder}
    return sorted(requests for requests in wanted if requests * query_len <= ladder.top)
