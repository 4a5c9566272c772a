"""The program itself: what it imports, and how an error looks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rung import __version__
from rung.errors import InternalError, UnknownModelError
from tests.cli.conftest import refused


def test_help_imports_neither_torch_nor_transformers() -> None:
    script = "import sys; import rung.cli.app; print([name for name in ('torch', 'transformers', 'rich') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_package_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "rung.cli", "--version"]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert __version__ in result.stdout


def test_every_command_has_help(rung: Callable[..., Result]) -> None:
    for command in ("generate", "bench", "doctor", "ladder"):
        assert "--debug" in rung(command, "--help").output


def test_error_is_one_line_and_a_hint(rung: Callable[..., Result]) -> None:
    assert "no/such/model" in refused(rung("generate", "no/such/model", "hello"))


def test_debug_shows_the_error_itself(rung: Callable[..., Result]) -> None:
    with pytest.raises(UnknownModelError):
        rung("generate", "no/such/model", "hello", "--debug")


def test_unexpected_error_asks_for_debug(rung: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.cli.doctor.examine", lambda: 1 // 0)
    result = rung("doctor")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ZeroDivisionError")
    assert "--debug" in result.stderr


def test_an_invariant_that_does_not_hold_is_a_bug(rung: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise InternalError("this cannot be", hint="report it")

    monkeypatch.setattr("rung.cli.doctor.examine", broken)
    result = rung("doctor")
    assert (result.exit_code, result.stderr) == (1, "error: this cannot be\nhint: report it\n")


@pytest.mark.parametrize("words", [("doctor",), ("doctor", "--debug")], ids=" ".join)
def test_an_interrupt_is_one_line(words: tuple[str, ...], rung: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rung.cli.doctor.examine", interrupted)
    result = rung(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "error: interrupted\n")
