from __future__ import annotations

import dataclasses
import threading

import pytest

from rung.context import ForwardContext, find_forward_context, get_forward_context, set_forward_context
from rung.errors import ContextError


def test_reading_outside_of_a_step_says_what_to_do() -> None:
    with pytest.raises(ContextError, match="no forward context") as caught:
        get_forward_context()
    assert "set_forward_context" in caught.value.hint


def test_the_block_yields_and_sets_the_context() -> None:
    context = ForwardContext(num_actual_tokens=3)
    with set_forward_context(context) as yielded:
        assert yielded is context
        assert get_forward_context() is context
    assert find_forward_context() is None


def test_nested_blocks_restore_the_outer_context() -> None:
    outer, inner = ForwardContext(mode="none"), ForwardContext(mode="full")
    with set_forward_context(outer):
        with set_forward_context(inner):
            assert get_forward_context() is inner
        assert get_forward_context() is outer


def test_an_error_inside_the_block_unsets_the_context() -> None:
    with pytest.raises(ZeroDivisionError), set_forward_context(ForwardContext()):
        1 / 0  # noqa: B018  (raises on purpose)
    assert find_forward_context() is None


def test_another_thread_does_not_see_the_context() -> None:
    seen: list[ForwardContext | None] = []
    with set_forward_context(ForwardContext()):
        thread = threading.Thread(target=lambda: seen.append(find_forward_context()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_context_cannot_be_changed_after_it_was_set() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ForwardContext().mode = "full"  # type: ignore[misc]


def test_defaults_describe_a_step_without_a_graph() -> None:
    context = ForwardContext()
    assert (context.mode, context.descriptor, context.num_actual_tokens) == ("none", None, 0)
    assert dict(context.attention_metadata) == dict(context.attention_layers) == {}
