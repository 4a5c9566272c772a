"""The forward context: what an op needs in a step beyond its tensor arguments.

Attention ops carry only the name of their layer; metadata, slot mapping and the KV cache are looked up here. The context is ambient
(a `ContextVar`), set by a `with` block, and nested blocks restore the outer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rung.errors import ContextError


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step's ambient data. Whoever sets it owns the tensors inside; readers keep nothing."""

    attention_metadata: Mapping[str, Any] = field(default_factory=dict)  # layer name -> AttentionMetadata, one object a KV-cache group
    attention_layers: Mapping[str, Any] = field(default_factory=dict)  # layer name -> the Attention module with its bound KV cache
    mode: str = "none"  # a graphs.GraphMode value: how this step runs
    descriptor: Any = None  # the graphs.Descriptor of this step; without a graph it has the step's own sizes
    num_actual_tokens: int = 0  # rows that belong to requests; rows behind them are padding


_current: ContextVar[ForwardContext | None] = ContextVar("rung_forward_context", default=None)


def get_forward_context() -> ForwardContext:
    """The context of the running step. Raises `ContextError` outside of one."""
    context = _current.get()
    if context is None:
        raise ContextError(
            "no forward context is set: an attention op ran outside of a step",
            hint="run the model inside `with set_forward_context(...)`, or through a ModelRunner",
        )
    return context


def find_forward_context() -> ForwardContext | None:
    """The context of the running step, or None outside of one."""
    return _current.get()


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one inside the block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
