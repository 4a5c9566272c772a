"""Grammars compiled by xgrammar (the extra `grammar`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rung.errors import BackendUnavailableError, GrammarError
from rung.runner.grammar.base import Grammar, GrammarMatcher

if TYPE_CHECKING:
    import xgrammar


class GrammarCompiler:
    """Compiles grammars for one vocabulary; building one takes a moment, so keep it.

    `backend` is a `tokenizers.Tokenizer`, `vocab_size` the width of the model's logits, and `stop_ids` are the tokens that may end an
    output once it is complete. Raises `BackendUnavailableError` without xgrammar, and `GrammarError` for what it refuses."""

    def __init__(self, backend: Any, *, vocab_size: int, stop_ids: Collection[int]) -> None:
        if find_spec("xgrammar") is None:
            raise BackendUnavailableError("grammars need xgrammar, which is not installed", hint="pip install 'rung[grammar]'")
        import xgrammar

        if not stop_ids:
            raise GrammarError("the model has no end token, so an output could never end", hint="give stop_ids")
        vocab = [""] * vocab_size
        for text, token in backend.get_vocab(with_added_tokens=True).items():
            if token < vocab_size:
                vocab[token] = text
        kind = getattr(xgrammar.VocabType, _spelling(backend))
        info = xgrammar.TokenizerInfo(vocab, vocab_type=kind, vocab_size=vocab_size, stop_token_ids=sorted(stop_ids))
        self._compiler = xgrammar.GrammarCompiler(info)

    def json_schema(self, schema: str | Mapping[str, Any], *, any_whitespace: bool = False) -> Grammar:
        """Outputs are JSON that the schema accepts, on one line. With `any_whitespace` a model may format it, which small ones do without
        end."""
        source = schema if isinstance(schema, str) else json.dumps(schema)
        return self._compile("JSON schema", partial(self._compiler.compile_json_schema, any_whitespace=any_whitespace), source)

    def regex(self, pattern: str) -> Grammar:
        """Outputs match the pattern as a whole."""
        return self._compile("regular expression", self._compiler.compile_regex, pattern)

    def ebnf(self, grammar: str) -> Grammar:
        """Outputs follow a grammar in the EBNF of GBNF; its first rule is named root."""
        return self._compile("grammar", self._compiler.compile_grammar, grammar)

    def _compile(self, kind: str, compile_: Any, source: str) -> Grammar:
        try:
            return XGrammar(compile_(source))
        except Exception as error:  # its own classes differ between versions
            said = str(error).strip()
            raise GrammarError(f"xgrammar does not take this {kind}: {said}", hint="see its documentation for what it knows") from error


class XGrammar(Grammar):
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def matcher(self) -> GrammarMatcher:
        import xgrammar

        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled))


class XGrammarMatcher(GrammarMatcher):
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))

    def fill(self, row: npt.NDArray[np.int32]) -> bool:
        if self._matcher.is_terminated():
            return False  # the end token was sampled; what comes behind it is dropped
        return bool(self._matcher.fill_next_token_bitmask(row.reshape(1, -1)))


def _spelling(backend: Any) -> str:
    """How the vocabulary spells bytes that are no text, which its decoder undoes."""
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
    if '"ByteLevel"' in decoder:
        return "BYTE_LEVEL"
    return "BYTE_FALLBACK" if '"ByteFallback"' in decoder else "RAW"
