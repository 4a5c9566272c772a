"""Grammars: what the text of a request must be."""

from rung.runner.grammar.base import Grammar, GrammarMask, GrammarMatcher, num_words

__all__ = ["Grammar", "GrammarMask", "GrammarMatcher", "num_words"]
