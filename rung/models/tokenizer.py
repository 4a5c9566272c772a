"""Text to ids and back: a thin layer over a `tokenizers.Tokenizer` with the model's chat template and stop ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rung.errors import TokenizerError
from rung.models.chat import ChatTemplate

_HELD_CHARACTERS = 3  # an unfinished UTF-8 sequence is at most three bytes, each shown as one U+FFFD by some decoders
_CONTEXT_TOKENS = 4
_WINDOW_TOKENS = 16
_WINDOW_TOKENS_UNFINISHED = 64


class Tokenizer:
    """`backend` is a `tokenizers.Tokenizer`; `stop_ids` end a generation."""

    def __init__(self, backend: Any, *, stop_ids: Iterable[int] = (), chat_template: ChatTemplate | None = None) -> None:
        self.backend = backend
        self.stop_ids = frozenset(stop_ids)
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens written in it are recognised. `add_special_tokens` adds what the model wants in front."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation. Raises `TokenizerError` without a template."""
        if self.chat_template is None:
            raise TokenizerError("this model has no chat template", hint="give the prompt as plain text, or use an instruction-tuned model")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, ready for the model to answer."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt), add_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Text of a growing id sequence; the parts put together equal `decode` of all ids. One per request.

    Characters whose bytes have not all come are held back. Only a few last ids are decoded again at each call."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text already handed out

    def add(self, ids: Sequence[int]) -> str:
        """Take further ids; returns the text that is certain now, maybe empty."""
        self._window.extend(ids)
        text = self._decode(self._window)
        held = min(_HELD_CHARACTERS, len(text) - len(text.rstrip("\ufffd")))
        fresh = text[self._sent : len(text) - held]
        self._sent += len(fresh)
        if len(self._window) > (_WINDOW_TOKENS_UNFINISHED if held else _WINDOW_TOKENS):
            self._shorten(text, held)
        return fresh

    def finish(self) -> str:
        """What is still held back, with U+FFFD for the bytes that never came."""
        fresh = self._decode(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return fresh

    def _shorten(self, text: str, held: int) -> None:
        """Keep a few ids as context, for decoders that look at the previous one."""
        context = self._window[-_CONTEXT_TOKENS:]
        tail = self._decode(context)
        if held or text.endswith(tail):
            self._window, self._sent = context, max(0, len(tail) - held)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
