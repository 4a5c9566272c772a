"""What users get of a request, and a request on its way there: text, stop texts, grammar, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rung.errors import RequestError
from rung.runner.request import FinishReason, Request
from rung.runner.sampler.logprobs import TokenLogprobs
from rung.runner.text import Detokenizer, StopText


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request. `text` is empty without a tokenizer; a stop token is in `token_ids` but not in `text`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int | None
    error: str | None = None  # why, when the finish reason is ERROR
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # of `prompt_token_ids`, when asked for; the first one has none


class Update(NamedTuple):
    """What one step added to one request. `completion` is set with the last one."""

    # A tuple, since each step makes one for each request: a frozen dataclass takes three times as long.
    request_id: str
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, when asked for


class OpenRequest:
    """A request whose user waits. `take` gives it tokens until its update has a completion; a stop text ends it there, so the scheduler has
    to be told."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.error: str | None = None
        self._detokenizer = detokenizer
        self._stop_text = StopText(request.sampling.stop)
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        # whether an update that does not end the request needs nothing of `take`
        self.only_tokens = detokenizer is None and request.matcher is None and request.sampling.logprobs is None

    def take(self, tokens: tuple[int, ...], logprobs: Sequence[TokenLogprobs] = ()) -> Update:
        """New tokens, which the request has already, and their text. What its grammar or tokenizer raises goes through."""
        request = self.request
        if request.matcher is not None:
            for token in tokens:
                if not request.matcher.accept(token):
                    raise RequestError(f"the grammar refused token {token} of the output", hint="its mask allowed what it does not accept")
        tokens, text = self._text(tokens)
        new_logprobs = None
        if request.sampling.logprobs is not None:
            new_logprobs = tuple(logprobs[: len(tokens)])
            self._logprobs += new_logprobs
        self._parts.append(text)
        completion = self._complete() if request.finish_reason is not None else None
        return Update(request.request_id, tokens, text, completion, new_logprobs)

    def fail(self, tokens: tuple[int, ...], error: BaseException) -> Update:
        """The last update of a request that something failed, with the text that it has."""
        self.request.finish_reason = FinishReason.ERROR
        self.request.matcher = self._detokenizer = None
        self.error = f"{type(error).__name__}: {error}"
        return self.take(tokens)

    def add_prompt_logprobs(self, position: int, found: Sequence[TokenLogprobs]) -> None:
        """Those of the prompt's tokens from `position` on; the ones computed again after a preemption are known."""
        self._prompt_logprobs += found[len(self._prompt_logprobs) - position :]

    def _text(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The tokens up to a stop text, and their text."""
        request, detokenizer, stop_text = self.request, self._detokenizer, self._stop_text
        if detokenizer is None:
            return tokens, ""
        shown = tokens[:-1] if request.finish_reason is FinishReason.STOP else tokens
        if len(shown) > 1 and request.sampling.stop:
            tokens, text = self._until_stop(detokenizer, tokens, shown)
        else:
            text = stop_text.add(detokenizer.add(shown))
        if request.finish_reason is not None:
            text += stop_text.add(detokenizer.finish())
        if stop_text.found:
            request.finish_reason = FinishReason.STOP
        elif request.finish_reason is not None:
            text += stop_text.finish()
        return tokens, text

    def _until_stop(self, detokenizer: Detokenizer, tokens: tuple[int, ...], shown: Sequence[int]) -> tuple[tuple[int, ...], str]:
        """Text of several tokens at once. Those behind a stop text are dropped, as if the request had stopped after the step with it."""
        text, output = "", self.request.output_token_ids
        for count, token in enumerate(shown, start=1):
            text += self._stop_text.add(detokenizer.add((token,)))
            if self._stop_text.found:
                del output[len(output) - (len(tokens) - count) :]
                return tokens[:count], text
        return tokens, text

    def _complete(self) -> Completion:
        request = self.request
        assert request.finish_reason is not None
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(request.output_token_ids),
            text="".join(self._parts),
            finish_reason=request.finish_reason,
            seed=request.sampling.seed,
            error=self.error,
            logprobs=tuple(self._logprobs) if request.sampling.logprobs is not None else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if request.sampling.prompt_logprobs is not None else None,
        )
