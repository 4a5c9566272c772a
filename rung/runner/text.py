"""Text out of tokens: what the engine asks of a tokenizer, and stop texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Text of a growing sequence of token ids; one for each request."""

    def add(self, ids: Sequence[int], /) -> str:
        """The text that further ids make certain; unfinished characters are held back."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class Tokenizer(Protocol):
    @property
    def stop_ids(self) -> Collection[int]:
        """Ids that end a generation."""
        ...

    def encode(self, text: str, /) -> list[int]: ...

    def detokenizer(self) -> Detokenizer: ...


class StopText:
    """Watches a stream of text for stop texts. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that is safe to hand out now; everything from the first stop text on is dropped."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]  # the one that is complete first, however the text came in parts
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and turned out to be no stop text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[len(text) - n :])), 0)
