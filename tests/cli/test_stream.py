from __future__ import annotations

import io

from rung.cli.stream import TextStream
from rung.runner import Completion, FinishReason, Update


def update(index: int, text: str, *, last: bool = False) -> tuple[int, Update]:
    completion = Completion(
        request_id=str(index), prompt_token_ids=(1,), token_ids=(2,), text=text, finish_reason=FinishReason.STOP, seed=None
    )
    return index, Update(request_id=str(index), token_ids=(2,), text=text, completion=completion if last else None)


def test_one_prompt_is_text_and_nothing_else() -> None:
    out = io.StringIO()
    stream = TextStream(1, out)
    stream.add(*update(0, "a"))
    assert out.getvalue() == "a"
    stream.add(*update(0, "b", last=True))
    assert out.getvalue() == "ab\n"


def test_later_prompt_waits_for_its_turn() -> None:
    out = io.StringIO()
    stream = TextStream(2, out)
    stream.add(*update(1, "second ", last=True))
    stream.add(*update(0, "first", last=True))
    assert out.getvalue().split() == ["[1/2]", "first", "[2/2]", "second"]


def test_text_that_waited_comes_before_what_follows() -> None:
    out = io.StringIO()
    stream = TextStream(2, out)
    stream.add(*update(1, "x"))
    stream.add(*update(0, "a", last=True))
    stream.add(*update(1, "y", last=True))
    assert out.getvalue().endswith("[2/2] xy\n")


def test_completions_are_kept_by_prompt() -> None:
    stream = TextStream(2, io.StringIO())
    stream.add(*update(1, "b", last=True))
    assert list(stream.completions) == [1]
