"""A request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rung.runner.grammar.base import GrammarMatcher
from rung.runner.sampler.params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop token or a stop text
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # cancelled
    ERROR = "error"  # a step of the request failed, or no token could be sampled for it


class RequestStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, without a slot or blocks
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Tokens and progress of one request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_total_tokens: int  # prompt and output
    stop_token_ids: frozenset[int] = frozenset()
    matcher: GrammarMatcher | None = None  # of a request with a grammar
    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0  # scheduled tokens, those of steps in flight included
    num_in_flight: int = 0  # tokens being sampled that the host does not know yet
    num_tokens: int = field(init=False)  # tokens of the request, those in flight included
    num_preemptions: int = 0
    num_blocks: int = 0  # entries of the request's block table rows, kept by `KVBlocks`
    block_keys: list[bytes] = field(default_factory=list)  # of its first full blocks, by content, kept by `KVBlocks`

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    def known_tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens that the host knows, prompt and output."""
        first = len(self.prompt_token_ids)
        return (*self.prompt_token_ids[start:stop], *self.output_token_ids[max(0, start - first) : max(0, stop - first)])

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def take(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Take sampled tokens that have arrived up to the one that ends the request, if one does; returns those taken."""
        output = self.output_token_ids
        room = self.max_total_tokens - len(self.prompt_token_ids) - len(output)
        if room > 1 and len(tokens) == 1 and tokens[0] not in self.stop_token_ids:  # as nearly always
            output.append(tokens[0])
            self.num_in_flight -= 1
            return tokens
        for count, token in enumerate(tokens, start=1):
            output.append(token)
            if token in self.stop_token_ids:
                self.finish_reason = FinishReason.STOP
            elif count == room:
                self.finish_reason = FinishReason.LENGTH
            else:
                continue
            tokens = tokens[:count]  # later steps of the same replay ran past the end
            break
        self.num_in_flight -= len(tokens)
        return tokens
