"""A grammar without a compiler: the output is one of some token sequences, then an end token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rung.runner.grammar import Grammar, GrammarMatcher


class OneOf(Grammar):
    def __init__(self, choices: Sequence[Sequence[int]], end: int) -> None:
        self.choices = [(*choice, end) for choice in choices]
        self.matchers: list[OneOfMatcher] = []

    def matcher(self) -> OneOfMatcher:
        self.matchers.append(OneOfMatcher(self.choices))
        return self.matchers[-1]


class OneOfMatcher(GrammarMatcher):
    def __init__(self, choices: Sequence[tuple[int, ...]]) -> None:
        self.choices = choices
        self.accepted: tuple[int, ...] = ()
        self.fills = 0

    def accept(self, token: int) -> bool:
        self.accepted += (token,)
        return bool(self._next(len(self.accepted) - 1))

    def fill(self, row: npt.NDArray[np.int32]) -> bool:
        self.fills += 1
        allowed = self._next(len(self.accepted))
        if not allowed:
            return False
        row[:] = 0
        words = row.view(np.uint32)
        for token in allowed:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return True

    def _next(self, place: int) -> set[int]:
        return {choice[place] for choice in self.choices if len(choice) > place and choice[:place] == self.accepted[:place]}
