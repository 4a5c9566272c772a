"""What a request may say about sampling."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rung.errors import SamplingParamsError
from rung.runner.grammar.base import Grammar

_LARGEST = 2**31 - 1  # of token ids and counts, as of positions; no vocabulary or context is larger
_LEAST = 1e-5  # divisors below it, or above its inverse, leave nothing of a logit in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated when built; raises `SamplingParamsError`. Token ids are held against the vocabulary when a request is admitted.

    The filters are applied in this order: grammar, allowed ids and minimum length, bias, penalties, bad words, temperature, min-p, top-k,
    top-p. Log-probabilities are those of the model, before any of them."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # sample from the k most likely tokens; 0: all
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    min_p: float = 0.0  # sample from tokens that have at least this part of the best one's probability
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, times how often they are in it
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or output
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to logits, by token id
    allowed_token_ids: Collection[int] | None = None  # nothing else is sampled
    bad_words: Sequence[Sequence[int]] = ()  # token sequences that the output will not contain
    min_tokens: int = 0  # end and stop tokens are not sampled before so many output tokens
    seed: int | None = None  # None: drawn when the request is admitted
    max_tokens: int | None = None  # output tokens; None: until the context is full
    stop: Sequence[str] = ()  # text that ends the output and is not part of it
    stop_token_ids: Collection[int] = frozenset()  # beside the model's own end tokens
    ignore_eos: bool = False  # do not stop at the model's end tokens
    logprobs: int | None = None  # log-probabilities of so many most likely tokens, and of the sampled one
    prompt_logprobs: int | None = None  # the same at every position of the prompt
    grammar: Grammar | None = None  # what the output's text must be

    def __post_init__(self) -> None:
        self._normalise()
        in_range = _is_number(self.temperature) and (self.temperature == 0 or _LEAST <= self.temperature <= 1 / _LEAST)
        _require(in_range, "temperature", self.temperature, f"0 (greedy), or a number from {_LEAST} to {1 / _LEAST:g}")
        _require(_is_count(self.top_k), "top_k", self.top_k, f"an integer from 0 (all tokens) to {_LARGEST}")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "a number in [-2, 2]")
        penalty = self.repetition_penalty
        in_range = _is_number(penalty) and _LEAST <= penalty <= 1 / _LEAST
        _require(in_range, "repetition_penalty", penalty, f"a number from {_LEAST} to {1 / _LEAST:g}")
        _require(all(map(_is_number, self.logit_bias.values())), "logit_bias", dict(self.logit_bias), "a mapping from token ids to numbers")
        _require(self.allowed_token_ids is None or bool(self.allowed_token_ids), "allowed_token_ids", [], "a list that is not empty")
        _require(all(self.bad_words), "bad_words", self.bad_words, "token sequences that are not empty")
        _require(self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63), "seed", self.seed, "an integer of 64 bits")
        count = self.max_tokens
        _require(count is None or (_is_int(count) and count >= 1), "max_tokens", count, "an integer of at least 1")
        limit = f"max_tokens={count}" if count is not None and count <= _LARGEST else str(_LARGEST)
        in_range = _is_count(self.min_tokens) and (count is None or self.min_tokens <= count)
        _require(in_range, "min_tokens", self.min_tokens, f"an integer in [0, {limit}]")
        _require(all(isinstance(text, str) and text for text in self.stop), "stop", self.stop, "texts that are not empty")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_count(value), name, value, f"an integer from 0 (the token's own alone) to {_LARGEST}")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _require(self.grammar is None or isinstance(self.grammar, Grammar), "grammar", self.grammar, "a rung.runner.Grammar")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def token_ids(self) -> dict[str, set[int]]:
        """All token ids in these parameters, by the name of the parameter."""
        return {
            "logit_bias": set(self.logit_bias),
            "allowed_token_ids": set(self.allowed_token_ids or ()),
            "bad_words": {token for word in self.bad_words for token in word},
            "stop_token_ids": set(self.stop_token_ids),
        }

    def check_vocabulary(self, request_id: str, vocab_size: int) -> None:
        """Raises `SamplingParamsError` for token ids that the model does not have, and for more log-probabilities than it has tokens."""
        for name, token_ids in self.token_ids().items():
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise SamplingParamsError(
                        f"request {request_id!r}: {name} has token {token}, expected ids in [0, {vocab_size})",
                        hint="use ids of the model's own tokenizer",
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise SamplingParamsError(
                    f"request {request_id!r}: {name} is {count}, and the vocabulary has {vocab_size} tokens", hint=f"lower {name}"
                )

    def _normalise(self) -> None:
        """Collections of our own, so that nobody changes them later."""
        _require(isinstance(self.stop, Sequence), "stop", self.stop, "a text or a list of texts")
        ids, stops, words, allowed = "a collection of token ids", self.stop_token_ids, self.bad_words, self.allowed_token_ids
        _require(_are_ids(stops), "stop_token_ids", stops, ids)
        biased = isinstance(self.logit_bias, Mapping) and all(map(_is_id, self.logit_bias))
        _require(biased, "logit_bias", self.logit_bias, "a mapping from token ids to numbers")
        nested = _is_collection(words) and all(map(_are_ids, words))
        _require(nested, "bad_words", words, "a list of token sequences, such as [[5], [7, 8]]")
        _require(allowed is None or _are_ids(allowed), "allowed_token_ids", allowed, ids)
        values: dict[str, Any] = {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "bad_words": tuple(tuple(word) for word in self.bad_words),
            "logit_bias": dict(self.logit_bias),
            "allowed_token_ids": None if allowed is None else frozenset(allowed),
            "stop_token_ids": frozenset(self.stop_token_ids),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_int(value) and 0 <= value <= _LARGEST  # type: ignore[operator]


def _is_id(value: object) -> bool:
    return _is_int(value) and abs(value) <= _LARGEST  # type: ignore[arg-type]


def _are_ids(value: object) -> bool:
    return _is_collection(value) and all(map(_is_id, value))  # type: ignore[call-overload]


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf and abs(value) < 1e30


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise SamplingParamsError(f"{name} must be {wanted}, got {value!r}", hint=f"change {name}, or leave it out for the default")
