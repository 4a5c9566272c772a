"""Where the text of running requests goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from rung.runner import Completion, Update


class Stream(ABC):
    """Takes updates as they come and keeps the completions by the index of their prompt."""

    def __init__(self) -> None:
        self.completions: dict[int, Completion] = {}

    def add(self, index: int, update: Update) -> None:
        if update.completion is not None:
            self.completions[index] = update.completion
        self.show(index, update.text)

    @abstractmethod
    def show(self, index: int, text: str) -> None:
        """New text of prompt `index`; called after its completion is known."""

    def describe(self, index: int, prompt: str) -> dict[str, Any]:
        """A finished prompt for JSON."""
        completion = self.completions[index]
        found = {
            **({"error": completion.error} if completion.error is not None else {}),
            **({"logprobs": [asdict(one) for one in completion.logprobs]} if completion.logprobs is not None else {}),
        }
        return {
            "prompt": prompt,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "prompt_tokens": len(completion.prompt_token_ids),
            "finish_reason": str(completion.finish_reason),
            "seed": completion.seed,
            **found,
        }


class JsonStream(Stream):
    """Shows nothing."""

    def show(self, index: int, text: str) -> None:
        pass


class TextStream(Stream):
    """One prompt: its text and nothing else. Several: each under a label, in order; the text of a later one waits until its turn."""

    def __init__(self, count: int, out: TextIO) -> None:
        super().__init__()
        self._count = count
        self._out = out
        self._turn = 0
        self._waiting: dict[int, str] = {}
        if count > 1:
            self._label()

    def show(self, index: int, text: str) -> None:
        if index != self._turn:
            self._waiting[index] = self._waiting.get(index, "") + text
            return
        self._write(text)
        while self._turn in self.completions:
            self._next()
        self._out.flush()

    def _next(self) -> None:
        self._write("\n")
        self._turn += 1
        if self._turn < self._count:
            self._write("\n")
            self._label()
            self._write(self._waiting.pop(self._turn, ""))

    def _label(self) -> None:
        click.secho(f"[{self._turn + 1}/{self._count}] ", file=self._out, bold=True, nl=False)

    def _write(self, text: str) -> None:
        self._out.write(text)
