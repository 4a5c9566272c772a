"""A plan in the making, and the step that it becomes: what a schedule notes of its requests until their tokens have come back."""

from __future__ import annotations

from dataclasses import dataclass, field

from rung.runner.plan import NewRequest
from rung.runner.request import Request


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose tokens have not come back."""

    requests: list[Request]
    sampling: dict[str, Request]  # those that get tokens
    filled: list[tuple[Request, int, int]]  # those that may fill blocks, the end of their computed tokens, and their preemptions by then


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    new: list[NewRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each
    only_decodes: bool = True  # each adds one token, and samples
    preempted: set[str] = field(default_factory=set)

    def take(self, request: Request, count: int) -> None:
        """A request that starts."""
        self.requests.append(request)
        self.counts.append(count)
        self.budget -= count
        self.only_decodes = False


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Requests that all decode, in a plan's order: while they go on, plans and steps share these."""

    requests: list[Request]
    scheduled: dict[str, int]
    by_id: dict[str, Request]

    @classmethod
    def of(cls, requests: list[Request]) -> _Decodes:
        by_id = {request.request_id: request for request in requests}
        return cls(requests, dict.fromkeys(by_id, 1), by_id)


class Progress:
    """Counts the tokens of plans as computed."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._decodes = _Decodes.of([])

    def advance(self, draft: Draft, num_steps: int) -> tuple[dict[str, int], StepInFlight]:
        """Count the plan's tokens as computed; returns them by request, and the step."""
        if draft.only_decodes:
            return self._advance_decodes(draft.requests, num_steps)
        requests, size = draft.requests, self._block_size
        sampling, filled = [], []
        for request, count in zip(requests, draft.counts, strict=True):
            end = request.num_computed_tokens + count
            if end == request.num_tokens:
                request.num_in_flight += 1
                request.num_tokens += 1
                sampling.append(request)
            request.num_computed_tokens = end
            if count > 1 or not end % size:
                filled.append((request, end, request.num_preemptions))
        scheduled = {request.request_id: count for request, count in zip(requests, draft.counts, strict=True)}
        return scheduled, StepInFlight(requests, {request.request_id: request for request in sampling}, filled)

    def _advance_decodes(self, requests: list[Request], num_steps: int) -> tuple[dict[str, int], StepInFlight]:
        """`advance` where every request decodes: only these are repeated, and only these come in hundreds."""
        size, filled = self._block_size, []
        for request in requests:
            request.num_computed_tokens = end = request.num_tokens + num_steps - 1
            request.num_tokens = end + 1
            request.num_in_flight += num_steps
            if num_steps > 1 or not end % size:
                filled.append((request, end, request.num_preemptions))
        if requests != self._decodes.requests:
            self._decodes = _Decodes.of(requests)
        decodes = self._decodes
        return decodes.scheduled, StepInFlight(decodes.requests, decodes.by_id, filled)
