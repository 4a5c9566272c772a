"""Requests that all decode, for measurements between two steps of an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from rung.runner import Engine, SamplingParams


class SteadyDecode:
    """Use `decoding`. A step of the engine is then a decode step of all requests, and enqueues the next before it reads the oldest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step(self) -> None:
        self._engine.step()

    def context(self) -> float:
        """Tokens in the KV cache of a request, the mean."""
        lengths = [request.num_computed_tokens for request in self._engine.scheduler.requests.values()]
        return sum(lengths) / len(lengths)


@contextmanager
def decoding(engine: Engine, requests: int, context: int, steps: int, vocab: int) -> Iterator[SteadyDecode]:
    """So many requests of random tokens whose prompts are computed, with at least `steps` steps before the first of them ends. All are
    cancelled at the end."""
    rng = random.Random(requests)
    prefills = -(-requests * context // engine.scheduler.config.max_num_tokens)  # early requests decode during the others' prefills
    params = SamplingParams(max_tokens=steps + prefills + 16, ignore_eos=True)
    waiting = {engine.add_request([rng.randrange(vocab) for _ in range(context)], params) for _ in range(requests)}
    ids = sorted(waiting)
    try:
        while waiting:
            waiting -= {update.request_id for update in engine.step() if update.token_ids}
        yield SteadyDecode(engine)
    finally:
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
