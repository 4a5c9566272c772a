"""What a request may say about sampling."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rung.errors import SamplingParamsError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated when built; raises `SamplingParamsError`."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # sample from the k most likely tokens; 0: all
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    seed: int | None = None  # None: drawn when the request is admitted
    max_tokens: int | None = None  # output tokens; None: until the context is full
    stop: Sequence[str] = ()  # text that ends the output and is not part of it
    stop_token_ids: Collection[int] = frozenset()  # beside the model's own end tokens
    ignore_eos: bool = False  # do not stop at the model's end tokens

    def __post_init__(self) -> None:
        _require(isinstance(self.stop, Sequence), "stop", self.stop, "a text or a list of texts")
        _require(isinstance(self.stop_token_ids, Collection), "stop_token_ids", self.stop_token_ids, "a collection of integers")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        _require(_is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number of at least 0")
        _require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer of at least 0 (0: all tokens)")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer")
        in_range = self.seed is None or -(2**63) <= self.seed < 2**63
        _require(in_range, "seed", self.seed, "an integer of 64 bits")
        count = self.max_tokens
        _require(count is None or (_is_int(count) and count >= 1), "max_tokens", count, "an integer of at least 1")
        _require(all(isinstance(text, str) and text for text in self.stop), "stop", self.stop, "texts that are not empty")
        _require(all(_is_int(token) for token in self.stop_token_ids), "stop_token_ids", set(self.stop_token_ids), "integers")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise SamplingParamsError(f"{name} must be {wanted}, got {value!r}", hint=f"change {name}, or leave it out for the default")
