"""The engine: prompts in, text out, all requests in one continuous batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rung.errors import GrammarMatchError, InternalError, RequestError, StepFailedError
from rung.runner.admission import Admission, Prompt
from rung.runner.executor.base import Executor
from rung.runner.grammar import GrammarMask
from rung.runner.output import ModelRunnerOutput
from rung.runner.request import FinishReason, Request
from rung.runner.sampler.logprobs import TokenLogprobs
from rung.runner.sampler.params import SamplingParams
from rung.runner.scheduler import Scheduler
from rung.runner.text import Detokenizer, StopText, Tokenizer


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one step added to one request. `completion` is set with the last one."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, when asked for


@dataclass(slots=True)
class _Output:
    """A request on its way to text."""

    request: Request
    detokenizer: Detokenizer | None
    stop_text: StopText
    parts: list[str] = field(default_factory=list)
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])


class Engine:
    """Adds requests, steps, and hands out text. Not thread-safe.

    A step enqueues the next plan before it waits for the tokens of the oldest one in flight. Bad input raises before anything of the call
    is scheduled, and leaves other requests as they are. When a step fails, `step` raises its error; the requests of that step end with the
    finish reason ERROR, which the next `step` hands out, and all others go on."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        stops = frozenset(stop_token_ids) | frozenset(tokenizer.stop_ids if tokenizer else ())
        self._vocab_size = vocab_size
        self._admission = Admission(scheduler.config.max_model_len, vocab_size, tokenizer, stops)
        self._outputs: dict[str, _Output] = {}
        self._in_flight: deque[Future[ModelRunnerOutput | None]] = deque()
        self._undelivered: list[Update] = []  # came while somebody else was stepping
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to hand out."""
        return bool(self.scheduler.has_work or self._in_flight or self._undelivered)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None) -> str:
        """Queue one request and return its id. Raises `RequestError`."""
        return self._add([(request_id, prompt, params or SamplingParams())])[0]

    def abort(self, request_id: str) -> None:
        """Cancel a request; its completion comes with the next `step`. Unknown and finished ids are ignored."""
        output = self._outputs.get(request_id)
        if output is not None:
            self.scheduler.finish(request_id, FinishReason.ABORT)
            self._undelivered.append(self._update(output, ()))

    def step(self) -> list[Update]:
        """Enqueue the next plan, and take the oldest result when enough are in flight or nothing could be enqueued."""
        enqueued = len(self._in_flight) < self.scheduler.config.steps_in_flight and self._enqueue()
        if self._in_flight and (not enqueued or len(self._in_flight) >= self.scheduler.config.steps_in_flight):
            self._undelivered += self._take(self._in_flight.popleft())  # what waits stays when this raises
        elif not enqueued and not self._undelivered and self.scheduler.has_unfinished:
            raise InternalError("requests are unfinished, but nothing could be scheduled and nothing is in flight")
        updates, self._undelivered = self._undelivered, []
        return updates

    def capture_due(self, seconds: float | None = None) -> int:
        """See `ModelRunner.capture_due`; call it when there is no work."""
        captured: int = self.executor.collective_rpc("capture_due", (seconds,)).result()
        return captured

    def suspend_graphs(self) -> None:
        """Free graphs and their memory, for example while another process needs the device; requests are unharmed."""
        self.executor.collective_rpc("suspend_graphs").result()

    def resume_graphs(self) -> None:
        """Capture again what `suspend_graphs` freed; until then steps run without graphs."""
        self.executor.collective_rpc("resume_graphs").result()

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, Update]]:
        """Run all prompts together; yields (index of the prompt, update) as tokens come. Raises `RequestError` here and now, before
        anything is scheduled. Closing the iterator cancels what is unfinished."""
        if isinstance(prompts, str):
            raise RequestError("the prompts are one text", hint="give a list of prompts")
        ids = self._add([(None, prompt, one) for prompt, one in zip(prompts, _spread(params, len(prompts)), strict=True)])
        updates = self._stream({request_id: index for index, request_id in enumerate(ids)})
        next(updates)  # a generator that was never started would not cancel its requests when it is dropped
        return updates  # type: ignore[return-value]

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[Completion]:
        """Run all prompts together to their end."""
        completions = {index: update.completion for index, update in self.stream(prompts, params) if update.completion is not None}
        return [completions[index] for index in range(len(prompts))]

    def _stream(self, open_requests: dict[str, int]) -> Iterator[tuple[int, Update] | None]:
        """The first value is None."""
        mine = dict(open_requests)
        try:
            yield None
            while open_requests:
                updates = self.step()
                self._undelivered += [update for update in updates if update.request_id not in mine]
                for update in updates:
                    if update.request_id in mine:
                        if update.completion is not None:
                            del open_requests[update.request_id]
                        yield mine[update.request_id], update
            self._flush()
        finally:
            for request_id in open_requests:
                self.abort(request_id)
            self._undelivered = [update for update in self._undelivered if update.request_id not in mine]

    def _flush(self) -> None:
        """Read what is in flight and free the slots, when nobody else has requests."""
        while not self._outputs and (self.scheduler.has_work or self._in_flight):
            self._undelivered += self.step()

    def _add(self, wanted: Sequence[tuple[str | None, Prompt, SamplingParams]]) -> list[str]:
        requests: dict[str, Request] = {}
        for given, prompt, params in wanted:
            request_id = self._free_id(requests) if given is None else given
            if request_id in requests or request_id in self._outputs:
                raise RequestError(f"request id {request_id!r} is in use", hint="give every unfinished request its own id")
            requests[request_id] = self._admission.admit(request_id, prompt, params)
        for request_id, request in requests.items():
            self.scheduler.add(request)
            detokenizer = self._tokenizer.detokenizer() if self._tokenizer else None
            self._outputs[request_id] = _Output(request, detokenizer, StopText(request.sampling.stop))
        return list(requests)

    def _free_id(self, requests: Collection[str]) -> str:
        """An id that no unfinished request has, whoever named it."""
        names = (f"request-{number}" for number in self._ids)
        return next(name for name in names if name not in requests and name not in self._outputs)

    def _enqueue(self) -> bool:
        """Enqueue the next plan; whether it had tokens."""
        if not self.scheduler.has_work:
            return False
        plan = self.scheduler.schedule()
        if not (plan.num_scheduled_tokens or plan.finished_request_ids or plan.preempted_request_ids):
            return False
        try:
            if self.executor.execute_model(plan).result() is not None:
                return False  # a plan without tokens was applied
            failed, mask = self._mask() if plan.has_bitmask else (None, None)  # raises nothing: the step must be sampled
            tokens = self.executor.sample_tokens(mask)
            if tokens.done() and (failure := tokens.exception()) is not None:
                raise failure
        except StepFailedError as error:
            raise self._fail(self.scheduler.fail(newest=True), error.__cause__ or error) from None
        self._in_flight.append(tokens)
        if failed is not None:
            raise failed
        return True

    def _mask(self) -> tuple[Exception | None, GrammarMask | None]:
        """In the window between the two calls: take the tokens of all earlier steps, since what may come next depends on them, and say
        what the requests with a grammar may sample now. The device computes the step's forward meanwhile. An error of an earlier step is
        returned, so that this one is sampled nevertheless."""
        failed = None
        while self._in_flight:
            try:
                self._undelivered += self._take(self._in_flight.popleft())
            except Exception as error:
                failed = error
        matchers = self.scheduler.matchers()
        while matchers:
            try:
                return failed, GrammarMask.of(matchers, self._vocab_size)
            except GrammarMatchError as error:
                del matchers[error.request_id]
                self._undelivered.append(self._end(self._outputs[error.request_id], (), error))
        return failed, None

    def _take(self, tokens: Future[ModelRunnerOutput | None]) -> list[Update]:
        try:
            output = tokens.result()
        except Exception as error:  # the device's: it shows when the tokens are read
            raise self._fail(self.scheduler.fail(newest=False), error) from None
        assert output is not None
        if output.prompt_logprobs:
            self._keep_prompt_logprobs(output)
        updates = []
        for request, taken in self.scheduler.update(output):
            one = self._outputs[request.request_id]
            if request.finish_reason is FinishReason.ERROR:
                one.error = output.errors.get(request.request_id)
            try:
                updates.append(self._update(one, taken, output.logprobs.get(request.request_id, ())))
            except Exception as error:  # of its grammar or tokenizer; other requests have nothing to do with that
                updates.append(self._end(one, taken, error))
        return updates

    def _end(self, output: _Output, tokens: Sequence[int], error: Exception) -> Update:
        """End a request that its own code failed, with the text that it has."""
        self.scheduler.finish(output.request.request_id, FinishReason.ERROR)
        output.request.finish_reason = FinishReason.ERROR
        output.request.matcher = output.detokenizer = None
        output.error = f"{type(error).__name__}: {error}"
        return self._update(output, tokens)

    def _keep_prompt_logprobs(self, output: ModelRunnerOutput) -> None:
        requests = self.scheduler.oldest_step()
        for request_id, (position, found) in output.prompt_logprobs.items():
            one = self._outputs.get(request_id)
            if one is not None and one.request is requests[request_id]:
                one.prompt_logprobs += found[len(one.prompt_logprobs) - position :]  # those computed again after a preemption are known

    def _fail(self, requests: Sequence[Request], error: BaseException) -> BaseException:
        """Give the failed requests their last updates."""
        for request in requests:
            output = self._outputs[request.request_id]
            output.error = f"{type(error).__name__}: {error}"
            self._undelivered.append(self._update(output, ()))
        return error

    def _update(self, output: _Output, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Update:
        """Turn new tokens into text, and end the request when its text says so."""
        request = output.request
        if request.matcher is not None:
            for token in tokens:
                if not request.matcher.accept(token):
                    raise RequestError(f"the grammar refused token {token} of the output", hint="its mask allowed what it does not accept")
        text = ""
        if output.detokenizer is not None:
            shown = tokens[:-1] if request.finish_reason is FinishReason.STOP else tokens
            if len(shown) > 1 and request.sampling.stop:
                tokens, text = self._until_stop(output, tokens, shown)
            else:
                text = output.stop_text.add(output.detokenizer.add(shown))
            if request.finish_reason is not None:
                text += output.stop_text.add(output.detokenizer.finish())
            if output.stop_text.found:
                self.scheduler.finish(request.request_id, FinishReason.STOP)
                request.finish_reason = FinishReason.STOP
            elif request.finish_reason is not None:
                text += output.stop_text.finish()
        new_logprobs = None
        if request.sampling.logprobs is not None:
            new_logprobs = tuple(logprobs[: len(tokens)])
            output.logprobs += new_logprobs
        output.parts.append(text)
        completion = self._complete(output) if request.finish_reason is not None else None
        return Update(request_id=request.request_id, token_ids=tuple(tokens), text=text, completion=completion, logprobs=new_logprobs)

    def _until_stop(self, output: _Output, tokens: Sequence[int], shown: Sequence[int]) -> tuple[Sequence[int], str]:
        """Text of several tokens at once. Those behind a stop text are dropped, as if the request had stopped after the step with it."""
        assert output.detokenizer is not None
        text = ""
        for count, token in enumerate(shown, start=1):
            text += output.stop_text.add(output.detokenizer.add((token,)))
            if output.stop_text.found:
                del output.request.output_token_ids[len(output.request.output_token_ids) - (len(tokens) - count) :]
                return tokens[:count], text
        return tokens, text

    def _complete(self, output: _Output) -> Completion:
        request = output.request
        assert request.finish_reason is not None
        del self._outputs[request.request_id]
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(request.output_token_ids),
            text="".join(output.parts),
            finish_reason=request.finish_reason,
            seed=request.sampling.seed,
            error=output.error,
            logprobs=tuple(output.logprobs) if request.sampling.logprobs is not None else None,
            prompt_logprobs=tuple(output.prompt_logprobs) if request.sampling.prompt_logprobs is not None else None,
        )


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"the sampling parameters are a {type(params).__name__}", hint="give a SamplingParams, or a list of them")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters came for {count} prompts", hint="give one for all, or one for each prompt")
    return params
