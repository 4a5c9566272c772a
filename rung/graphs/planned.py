"""What to capture: the configured mode limited by the attention backend, and the descriptors of a ladder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from rung.attention.base import CaptureSupport
from rung.graphs.descriptor import ConfiguredMode, Descriptor, GraphMode
from rung.graphs.ladder import Ladder
from rung.graphs.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedMode:
    """What holds after the attention backend was asked, for uniform decode batches and for all others."""

    decode: GraphMode
    mixed: GraphMode
    decode_reason: Reason = Reason.BEST  # why `decode` is not what was asked
    mixed_reason: Reason = Reason.BEST
    full_reason: Reason = Reason.BEST  # why a FULL graph is not one graph


def resolve_mode(
    mode: ConfiguredMode,
    support: CaptureSupport = CaptureSupport.ALWAYS,
    uniform_query_len: int = 1,
    *,
    host_breaks: bool = False,
) -> ResolvedMode:
    """Limit the configured mode by what the attention backend can capture; what is lost becomes PIECEWISE with a reason.

    `host_breaks`: the plan has breaks that decide on the host. They cut a FULL graph into several, and its steps say so."""
    needed = CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE if uniform_query_len == 1 else CaptureSupport.UNIFORM_BATCH
    decode_lost = mode.decode is GraphMode.FULL and support < needed
    mixed_lost = mode.mixed is GraphMode.FULL and support < CaptureSupport.ALWAYS
    return ResolvedMode(
        decode=GraphMode.PIECEWISE if decode_lost else mode.decode,
        mixed=GraphMode.PIECEWISE if mixed_lost else mode.mixed,
        decode_reason=Reason.BACKEND_LIMIT if decode_lost else Reason.BEST,
        mixed_reason=Reason.BACKEND_LIMIT if mixed_lost else Reason.BEST,
        full_reason=Reason.HOST_BREAK if host_breaks else Reason.BEST,
    )


def plan_descriptors(
    ladder: Ladder,
    mode: ConfiguredMode,
    *,
    max_num_requests: int | None = None,
    uniform_query_lens: Sequence[int] = (1,),
    capture_support: CaptureSupport = CaptureSupport.ALWAYS,
    symbols: Mapping[str, Ladder] | None = None,
    adapters: Sequence[int] = (0,),
    variants: Sequence[str] = ("",),
) -> tuple[Descriptor, ...]:
    """All descriptors to capture, in capture order.

    PIECEWISE for every size. FULL for uniform decode of each of `uniform_query_lens` (1, and 1 plus the drafts where there is speculation)
    up to `max_num_requests` requests, whose number is a size of its own, so that the largest decode batch has a graph. FULL without
    conditions for mixed batches when the backend reads lengths on the device and FULL was asked for all, and for modules without requests
    (`max_num_requests` None). All of that once for each combination of `symbols` (further named dimensions), `adapters` and `variants`."""
    planned: dict[Descriptor, None] = {}
    for query_len in uniform_query_lens:
        resolved = resolve_mode(mode, capture_support, query_len)
        if GraphMode.PIECEWISE in (resolved.decode, resolved.mixed):
            planned.update((Descriptor(mode=GraphMode.PIECEWISE, num_tokens=size), None) for size in ladder)
        if resolved.decode is GraphMode.FULL and max_num_requests is not None:
            for requests in _request_sizes(ladder, max_num_requests, query_len):
                planned[_uniform(requests, query_len)] = None
        whole = resolved.decode if max_num_requests is None else resolved.mixed
        if whole is GraphMode.FULL:
            for size in ladder:
                most = None if max_num_requests is None else min(size, max_num_requests)
                planned[Descriptor(mode=GraphMode.FULL, num_tokens=size, num_requests=most)] = None
    names = sorted(symbols or {})
    others = [tuple(zip(names, sizes, strict=True)) for sizes in product(*((symbols or {})[name] for name in names))]
    return capture_order(
        replace(descriptor, symbols=other, adapters=active, variant=variant)
        for descriptor, other, active, variant in product(planned, others, adapters, variants)
    )


def capture_order(descriptors: Iterable[Descriptor]) -> tuple[Descriptor, ...]:
    """PIECEWISE before FULL, the largest first, so that smaller graphs reuse the memory of larger ones."""
    return tuple(sorted(descriptors, key=lambda d: (d.mode.rank, -d.volume, -(d.num_requests or 0), d.uniform_query_len is None)))


def _uniform(requests: int, query_len: int) -> Descriptor:
    return Descriptor(
        mode=GraphMode.FULL,
        num_tokens=requests * query_len,
        num_requests=requests,
        uniform_query_len=query_len,
        max_query_len=query_len,
    )


def _request_sizes(ladder: Ladder, max_num_requests: int, query_len: int) -> list[int]:
    """Numbers of requests with a FULL decode graph: each ladder size rounded up to whole requests, the maximum among them."""
    wanted = {min(-(-size // query_len), max_num_requests) for size in ladder}
    return sorted(requests for requests in wanted if requests * query_len <= ladder.top)
