"""The engine: prompts in, text out, all requests in one continuous batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future

from rung.errors import GrammarMatchError, InternalError, RequestError, StepFailedError
from rung.runner.admission import Admission, Prompt
from rung.runner.completion import Completion, OpenRequest, Update
from rung.runner.executor.base import Executor
from rung.runner.grammar import GrammarMask
from rung.runner.output import ModelRunnerOutput
from rung.runner.request import FinishReason, Request
from rung.runner.sampler.params import SamplingParams
from rung.runner.scheduler import Scheduler
from rung.runner.text import Tokenizer


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
        self._outputs: dict[str, OpenRequest] = {}
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
            self._undelivered.append(self._close(output.take(())))

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
        if isinstance(prompts, str) or not isinstance(prompts, Collection):
            given = "one text" if isinstance(prompts, str) else f"a {type(prompts).__name__}"
            raise RequestError(f"the prompts are {given}", hint="give a list of prompts")
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
            if not isinstance(request_id, str) or not request_id:
                raise RequestError(f"a request id must be a text that is not empty, got {request_id!r}", hint="leave it out to get one")
            if request_id in requests or request_id in self._outputs:
                raise RequestError(f"request id {request_id!r} is in use", hint="give every unfinished request its own id")
            requests[request_id] = self._admission.admit(request_id, prompt, params)
        # All of them before the first is scheduled: a tokenizer may raise.
        opened = [OpenRequest(request, self._tokenizer.detokenizer() if self._tokenizer else None) for request in requests.values()]
        for one in opened:
            self.scheduler.add(one.request)
            self._outputs[one.request.request_id] = one
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
            failed_requests = self.scheduler.fail(newest=True) if plan.num_scheduled_tokens else ()  # without tokens it is no step
            raise self._fail(failed_requests, error.__cause__ or error) from None
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
                self._undelivered.append(self._close(self._outputs[error.request_id].fail((), error)))
        return failed, None

    def _take(self, tokens: Future[ModelRunnerOutput | None]) -> list[Update]:
        try:
            output = tokens.result()
        except Exception as error:  # the device's: it shows when the tokens are read
            raise self._fail(self.scheduler.fail(newest=False), error) from None
        assert output is not None
        if output.prompt_logprobs:
            self._keep_prompt_logprobs(output)
        updates: list[Update] = []
        for request, taken in self.scheduler.update(output):
            request_id = request.request_id
            one = self._outputs[request_id]
            if one.only_tokens and request.finish_reason is None:  # the common case costs one tuple
                updates.append(Update(request_id, taken, ""))
                continue
            if request.finish_reason is FinishReason.ERROR:
                one.error = output.errors.get(request_id)
            try:
                update = one.take(taken, output.logprobs.get(request_id, ()) if output.logprobs else ())
            except Exception as error:  # of its grammar or tokenizer; other requests have nothing to do with that
                update = one.fail(taken, error)
            updates.append(update if update.completion is None else self._close(update))
        return updates

    def _close(self, update: Update) -> Update:
        """The last update of a request: nobody else holds it any more."""
        assert update.completion is not None
        del self._outputs[update.request_id]
        self.scheduler.finish(update.request_id, update.completion.finish_reason)
        return update

    def _keep_prompt_logprobs(self, output: ModelRunnerOutput) -> None:
        requests = self.scheduler.oldest_step()
        for request_id, (position, found) in output.prompt_logprobs.items():
            one = self._outputs.get(request_id)
            if one is not None and one.request is requests[request_id]:
                one.add_prompt_logprobs(position, found)

    def _fail(self, requests: Sequence[Request], error: BaseException) -> BaseException:
        """Give the failed requests their last updates."""
        self._undelivered += [self._close(self._outputs[request.request_id].fail((), error)) for request in requests]
        return error


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"the sampling parameters are a {type(params).__name__}", hint="give a SamplingParams, or a list of them")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters came for {count} prompts", hint="give one for all, or one for each prompt")
    return params
