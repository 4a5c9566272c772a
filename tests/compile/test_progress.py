"""The bar while pieces are compiled."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import rung
from rung.compile.progress import piece_progress
from tests.compile.cases import Block, Stack


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make the error stream one; to be called in the test, since pytest puts its own there at the start of one."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize(("wanted", "shown"), [(True, True), (False, False)])
def test_a_compile_of_several_pieces_is_shown(monkeypatch: pytest.MonkeyPatch, wanted: bool, shown: bool) -> None:
    stream = terminal(monkeypatch)
    module = Stack([Block() for _ in range(3)])
    rung.wrap(module, dynamic={"x": {0: "rows"}}, split_ops=("rungtest::write",), progress=wanted)
    with torch.no_grad():
        module(torch.randn(3, 8))
    text = stream.getvalue()
    assert ("rung compiles Stack.forward" in text) == shown
    assert ("3/3" in text) == shown


def test_one_piece_and_files_get_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with piece_progress("a", 1, wanted=True) as advance:
        advance()
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with piece_progress("a", 3, wanted=True) as advance:
        advance()
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def interrupted() -> None:
    with piece_progress("a", 3, wanted=True) as advance:
        advance()
        raise KeyboardInterrupt


def test_an_interrupt_takes_the_bar_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased
