"""Grammars: what the text of a request must be."""

from rung.runner.grammar.base import Grammar, GrammarMask, GrammarMatcher, num_words
from rung.runner.grammar.xgrammar import GrammarCompiler

__all__ = ["Grammar", "GrammarCompiler", "GrammarMask", "GrammarMatcher", "num_words"]
