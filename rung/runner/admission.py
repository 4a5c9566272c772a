"""From what a user gives to a request, or an error before anything is scheduled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from rung.errors import PromptTooLongError, RequestError
from rung.runner.request import Request
from rung.runner.sampler.params import SamplingParams
from rung.runner.text import Tokenizer

Prompt = str | Sequence[int]


class Admission:
    """Validates prompts, and sampling parameters against the model. An unseeded request draws its seed here, so that it can be told
    afterwards."""

    def __init__(self, max_model_len: int, vocab_size: int, tokenizer: Tokenizer | None, stop_token_ids: frozenset[int]) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._random = random.Random()

    def admit(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Raises `RequestError` (of which `PromptTooLongError` is one)."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"request {request_id!r}: the sampling parameters are a {type(params).__name__}", hint="give a SamplingParams"
            )
        if params.stop and self._tokenizer is None:
            raise RequestError(
                f"request {request_id!r}: it stops at a text and the engine has no tokenizer",
                hint="give stop_token_ids, or build the engine with a tokenizer",
            )
        if params.grammar is not None and params.ignore_eos:
            raise RequestError(
                f"request {request_id!r}: a grammar ends with the model's end token, and ignore_eos=True takes it for text",
                hint="leave one of them out",
            )
        token_ids = self._token_ids(request_id, prompt)
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"request {request_id!r}: the prompt has {len(token_ids)} tokens; with max_model_len={self._max_model_len} a prompt may "
                f"have {self._max_model_len - 1}, so that one output token fits",
                hint="shorten the prompt, or raise max_model_len if the model's context allows it",
            )
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        params.check_vocabulary(request_id, self._vocab_size)
        stops = frozenset(params.stop_token_ids)
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            # The grammar stays on this side: workers get masks.
            sampling=replace(params, seed=seed, grammar=None),
            matcher=params.grammar.matcher() if params.grammar is not None else None,
            max_total_tokens=len(token_ids) + min(room, params.max_tokens or room),
            stop_token_ids=stops if params.ignore_eos else stops | self._stop_token_ids,
        )

    def _token_ids(self, request_id: str, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    f"request {request_id!r}: the prompt is text and the engine has no tokenizer",
                    hint="give token ids, or build the engine with a tokenizer",
                )
            prompt = self._tokenizer.encode(prompt)
        try:
            token_ids = tuple(prompt)
        except TypeError:
            raise RequestError(
                f"request {request_id!r}: the prompt is a {type(prompt).__name__}", hint="give a text, or a sequence of token ids"
            ) from None
        if not token_ids:
            raise RequestError(f"request {request_id!r}: the prompt is empty", hint="give at least one token")
        for index, token in enumerate(token_ids):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"request {request_id!r}: token {index} of the prompt is {token!r}, expected an id in [0, {self._vocab_size})",
                    hint="use the model's own tokenizer; arrays and tensors have tolist()",
                )
        return token_ids
