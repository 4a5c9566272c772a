"""First come, first served, under a token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rung.counters import Count, Counters
from rung.errors import RequestError
from rung.runner.config import RunnerConfig
from rung.runner.draft import Draft, Progress, StepInFlight
from rung.runner.grammar.base import GrammarMatcher
from rung.runner.kv_blocks import KVBlocks
from rung.runner.output import ModelRunnerOutput
from rung.runner.plan import CachedRequest, NewRequest, StepPlan
from rung.runner.request import FinishReason, Request, RequestStatus

_FINISHED = RequestStatus.FINISHED


class Scheduler:
    """Decides which requests run and how many tokens each adds; owns the blocks. `windows` are those of the runner's KV-cache groups.

    There are no phases: a request has tokens that are not computed yet, one in a decode, more in a prefill, and gets as many as the
    budget leaves. Running requests go first, in the order they came; then waiting ones while slots and blocks last. When a running request
    finds no block, the last one is preempted: it loses slot and blocks, and later computes again what the prefix cache has lost. Steps may
    be scheduled before the tokens of earlier ones are known."""

    def __init__(
        self, config: RunnerConfig, num_blocks: int, windows: Sequence[int | None] = (None,), counters: Counters | None = None
    ) -> None:
        self.config = config
        self.blocks = KVBlocks(config, num_blocks, windows)
        self.counters = Counters() if counters is None else counters
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._left: set[str] = set()  # finished since the last plan, their slots still held by the runner
        self._progress = Progress(config.block_size)
        self._num_grammars = 0  # unfinished requests with a grammar
        # Each step whose tokens have not come back; a preempted request may have re-entered since, so ids would not do.
        self._in_flight: deque[StepInFlight] = deque()

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` when its id is in use."""
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", hint="give every unfinished request its own id")
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._num_grammars += request.matcher is not None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """Unfinished requests, or changes that the runner has not been told."""
        return bool(self.requests or self._left)

    def schedule(self) -> StepPlan:
        """The next plan; it may have no tokens. Computed tokens are counted as of this plan."""
        draft = Draft(self.config.max_num_tokens)
        self._schedule_running(draft)
        if not draft.preempted:
            self._schedule_waiting(draft)
        num_steps = self._more_steps(draft)
        changes = tuple(
            CachedRequest(
                request_id=request_id,
                num_computed_tokens=self.requests[request_id].num_computed_tokens,
                new_block_ids=block_ids,
                num_null_blocks=nulls,
            )
            for request_id, block_ids, nulls in self.blocks.take_changes()
        )
        scheduled, step = self._progress.advance(draft, num_steps)
        finished, self._left = frozenset(self._left), set()
        plan = StepPlan(
            new_requests=tuple(draft.new),
            cached_requests=changes,
            num_scheduled_tokens=scheduled,
            finished_request_ids=finished,
            preempted_request_ids=frozenset(draft.preempted),
            num_steps=num_steps,
            has_bitmask=self._num_grammars > 0 and any(request.matcher is not None for request in step.sampling.values()),
        )
        if draft.requests:
            self._in_flight.append(step)
        return plan

    def matchers(self) -> dict[str, GrammarMatcher]:
        """The grammars of the requests that the newest step in flight samples; those that have ended since are left out."""
        sampling = self._in_flight[-1].sampling if self._in_flight else {}
        return {name: r.matcher for name, r in sampling.items() if r.matcher is not None and not r.is_finished}

    def oldest_step(self) -> dict[str, Request]:
        """The requests of the oldest step in flight. One that has ended since may have left its id to another."""
        return {request.request_id: request for request in self._in_flight[0].requests}

    def update(self, output: ModelRunnerOutput) -> list[tuple[Request, tuple[int, ...]]]:
        """Take the tokens of the oldest step in flight; returns each request that got some, with them. Requests that end are freed."""
        updates: list[tuple[Request, tuple[int, ...]]] = []
        ended = []
        step, errors = self._in_flight.popleft(), output.errors
        sampling = step.sampling
        find, note = sampling.get, updates.append  # the loop runs once for each request and step
        for request_id, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True):
            request = find(request_id)
            if request is None or request.status is _FINISHED or not (tokens or request_id in errors):
                continue
            taken = request.take(tokens)
            if errors and request.finish_reason is None and request_id in errors:
                request.finish_reason = FinishReason.ERROR
            note((request, taken))
            if request.finish_reason is not None:
                ended.append(request)
        self._keep_blocks(step)
        for request in ended:
            self._release(request)
        return updates

    def fail(self, *, newest: bool) -> list[Request]:
        """The newest or the oldest step in flight failed: end its requests and return them. What they have computed is lost. A plan without
        tokens is no step."""
        step = self._in_flight.pop() if newest else self._in_flight.popleft()
        failed = [request for request in step.requests if not request.is_finished]
        for request in failed:
            self.finish(request.request_id, FinishReason.ERROR)
        return failed

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request now (a stop text, a cancellation). Unknown ids are ignored: the request may just have ended by itself."""
        request = self.requests.get(request_id)
        if request is not None:
            request.finish_reason = reason
            self._release(request)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, after weights were replaced. Requests that run go on with the keys and values they have."""
        self.blocks.forget_prefixes()

    def _schedule_running(self, draft: Draft) -> None:
        chunk, size, budget, running = self.config.prefill_chunk, self.config.block_size, draft.budget, self.running
        take, note = draft.requests.append, draft.counts.append  # the loop runs once for each request and step
        for request in running:
            if budget <= 0:
                break
            computed, num_tokens = request.num_computed_tokens, request.num_tokens
            count = num_tokens - computed
            if count <= 0 or num_tokens >= request.max_total_tokens:
                continue
            if count > 1:
                count = min(count, chunk, budget)
                draft.only_decodes = False
            if computed + count > request.num_blocks * size and not self._make_room(request, computed + count, draft):
                break  # it was the last itself
            take(request)
            note(count)
            budget -= count
        draft.budget = budget

    def _make_room(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Blocks for a running request; others are preempted for it from the end, at last it itself."""
        while not self.blocks.grow(request, num_tokens):
            last = self.running.pop()
            self._preempt(last, draft)
            if last is request:
                return False
        return True

    def _schedule_waiting(self, draft: Draft) -> None:
        while self.waiting and draft.budget > 0 and len(self.running) < self.config.max_num_requests:
            request = self.waiting[0]
            if request.num_in_flight:
                return  # preempted while a token was on its way; that token belongs to its prefill
            prefix = self.blocks.find_prefix(request)
            count = min(request.num_tokens - prefix, self.config.prefill_chunk, draft.budget)
            block_ids = self.blocks.start(request, prefix, prefix + count)
            if block_ids is None:
                return
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed_tokens = prefix
            if self.config.prefix_cache:
                self.counters.add(Count.PREFIX_TOKENS, request.num_tokens)
                self.counters.add(Count.PREFIX_HIT_TOKENS, prefix)
            request.status = RequestStatus.RUNNING
            draft.new.append(
                NewRequest(
                    request_id=request.request_id,
                    token_ids=(*request.prompt_token_ids, *request.output_token_ids),
                    prompt_len=len(request.prompt_token_ids),
                    block_ids=block_ids,
                    sampling=request.sampling,
                    num_computed_tokens=prefix,
                    stop_token_ids=request.stop_token_ids,
                )
            )
            draft.take(request, count)

    def _more_steps(self, draft: Draft) -> int:
        """How often the plan may be repeated on the device: nobody waits, every request decodes, none ends by its length on the way."""
        limit = self.config.replay_steps
        requests = draft.requests
        if limit == 1 or self._num_grammars or self.waiting or draft.preempted or not (requests and draft.only_decodes):
            return 1
        num_steps = min(limit, *(request.max_total_tokens - request.num_tokens for request in requests))
        while num_steps > 1:
            if sum(self.blocks.num_missing(r, r.num_computed_tokens + num_steps) for r in requests) <= self.blocks.num_free:
                break
            num_steps //= 2
        else:
            return 1
        for request in requests:
            self.blocks.grow(request, request.num_computed_tokens + num_steps)
        return num_steps

    def _keep_blocks(self, step: StepInFlight) -> None:
        """The step has succeeded: requests may start behind what it computed. Its requests may have ended, or lost their blocks, since."""
        for request, end, preemptions in step.filled:
            failed = request.finish_reason is FinishReason.ERROR
            if not (request.is_finished or failed) and request.num_preemptions == preemptions:
                # The last known token was sampled, and is not computed by this step: a replay may have run past the end.
                known = len(request.prompt_token_ids) + len(request.output_token_ids)
                self.blocks.computed(request, min(end, known - 1))

    def _preempt(self, request: Request, draft: Draft) -> None:
        draft.preempted.add(request.request_id)
        self.blocks.free(request)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._left.add(request.request_id)
        else:
            self.waiting.remove(request)
        self.blocks.free(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        self._num_grammars -= request.matcher is not None
