"""What the runner asks of a grammar: which tokens may come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rung.errors import GrammarMatchError


class GrammarMatcher(ABC):
    """How far one request has come. Lives on the host; called in the window between the two calls of a step."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Take a token of the output, an end token included; False when the grammar does not allow it."""

    @abstractmethod
    def fill(self, row: npt.NDArray[np.int32]) -> bool:
        """Write which tokens may come next into `row` [ceil(vocab / 32)], bit i of word w standing for token 32 * w + i. False, with `row`
        as it was, when any token may."""


class Grammar(ABC):
    """A compiled grammar; many requests may share it."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of the grammar."""


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The tokens that some requests of a step may sample; all others are free."""

    rows: Mapping[str, int]  # request id -> row of `bits`
    bits: npt.NDArray[np.int32]  # [rows, ceil(vocab / 32)], packed as `GrammarMatcher.fill` says

    @classmethod
    def of(cls, matchers: Mapping[str, GrammarMatcher], vocab_size: int) -> GrammarMask | None:
        """What these requests may sample next; None when nothing is forbidden. Raises `GrammarMatchError`."""
        bits = np.zeros((len(matchers), num_words(vocab_size)), np.int32)
        rows: dict[str, int] = {}
        for request_id, matcher in matchers.items():
            try:
                limited = matcher.fill(bits[len(rows)])
            except Exception as error:
                text = f"the grammar of request {request_id!r} failed: {type(error).__name__}: {error}"
                raise GrammarMatchError(text, hint="the request ends with it", request_id=request_id) from error
            if limited:
                rows[request_id] = len(rows)
        return cls(rows, bits[: len(rows)]) if rows else None


def num_words(vocab_size: int) -> int:
    """Words of a packed mask."""
    return -(-vocab_size // 32)
