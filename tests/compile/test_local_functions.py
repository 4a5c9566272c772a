"""Functions that their names do not lead to: closures, what decorators made, lambdas. Their plans are found again, and never after an
edit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung.cache import use_store
from rung.errors import CacheMissError
from tests.compile.cases import run_python

TEXT = """
import contextlib, functools, os
from torch import nn

def times(factor):
    def decorate(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args) * factor
        return inner
    return decorate

def bare(function):
    def inner(x):
        return function(x) + 1
    return inner

def make(factor):
    def act(x):
        return x * factor
    return act

@times(2.0)
def helper(x):
    return x.relu() + 5

@bare
def hidden(x):
    return x.tanh()

square = lambda x: x * x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = make(6.0)

    @contextlib.contextmanager
    def block(self):
        yield 7

    @times(3.0)
    def part(self, x):
        return x + 8

    def forward(self, x):
        if os.environ.get("RUNG_TEST_FLAG"):
            x = -x
        with self.block() as number:
            x = x + number
        return self.act(helper(x)) + hidden(self.part(x)) + square(x)
"""
EDITS = {
    "inner function": ("function(*args) * factor", "function(*args) - factor"),
    "decorator": ("return function(x) + 1", "return function(x) + 2"),
    "decorated function": ("x.relu() + 5", "x.relu() + 6"),
    "function behind a decorator without its name": ("x.tanh()", "x.sigmoid()"),
    "another decorator": ("@bare", "@times(0.5)"),
    "no decorator": ("@bare", ""),
    "cell of a decorator": ("@times(2.0)", "@times(2.5)"),
    "cell of a decorated method": ("@times(3.0)", "@times(3.5)"),
    "cell of an attribute": ("make(6.0)", "make(6.5)"),
    "closure": ("return x * factor", "return x / factor"),
    "context manager": ("yield 7", "yield 8"),
    "lambda": ("x * x", "x * x * x"),
}
NAME = "rung_test_local_functions"


def module_of(text: str, folder: Path) -> Any:
    """The module `NAME` with this text, imported anew."""
    (folder / f"{NAME}.py").write_text(text)
    sys.modules.pop(NAME, None)
    importlib.invalidate_caches()
    return importlib.import_module(NAME)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the plan of `TEXT`."""
    folder = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch, use_store(root=folder / "store"):
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        rung.wrap(module_of(TEXT, folder).Net())(torch.ones(3, 4))
    sys.modules.pop(NAME)
    return folder


@pytest.fixture
def folder(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(filled)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, NAME, sys)  # whatever is imported goes again
    return filled


def test_the_unchanged_module_is_found_again(folder: Path) -> None:
    module = rung.wrap(module_of(TEXT, folder).Net())
    with use_store(root=folder / "store", require_hit=True):
        module(torch.ones(3, 4))


@pytest.mark.parametrize("edit", EDITS)
def test_no_edit_is_served_the_old_plan(edit: str, folder: Path) -> None:
    before, after = EDITS[edit]
    assert TEXT.count(before) == 1
    module = rung.wrap(module_of(TEXT.replace(before, after), folder).Net())
    with use_store(root=folder / "store", require_hit=True), pytest.raises(CacheMissError):
        module(torch.ones(3, 4))


def test_another_environment_is_not_served_the_old_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_TEST_FLAG", "1")
    module = rung.wrap(module_of(TEXT, folder).Net())
    with use_store(root=folder / "store", require_hit=True), pytest.raises(CacheMissError):
        module(torch.ones(3, 4))


def test_another_function_of_a_command_line_is_not_served_the_old_plan(tmp_path: Path, rung_cache_dir: Path) -> None:
    code = (
        "import rung, torch\ndef f(x):\n    return x * {}\nf = rung.wrap(f)\nx = torch.ones(2)\n"
        "print(f(x).tolist(), f.rung.report()[0]['source'])"
    )
    env = {"RUNG_CACHE_DIR": str(rung_cache_dir), "PATH": "/usr/bin:/bin"}
    printed = [run_python(code.format(factor), env=env, cwd=tmp_path) for factor in (2, 2, 3)]
    assert printed == ["[2.0, 2.0] compiled", "[2.0, 2.0] loaded", "[3.0, 3.0] compiled"]


def test_a_function_that_nothing_leads_to_is_not_kept_and_says_so(rung_cache_dir: Path) -> None:
    reasons = []
    for _ in range(3):
        names: dict[str, Any] = {"__name__": "nowhere"}
        exec(compile("def scaled(x):\n    return x * 2\n", "nowhere", "exec"), names)
        function = rung.wrap(names["scaled"])
        function(torch.ones(2))
        reasons.append(function.rung.report()[0]["reason"])
    assert reasons[0] == "the store has no plans of nowhere:scaled"
    assert set(reasons[1:]) == {"not cacheable: nothing leads to the source of scaled from another process"}
