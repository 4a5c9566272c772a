"""What is said when Inductor cannot build a piece."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import rung
from rung import torch_compat
from rung.errors import CompileError

BROKEN = """#!/bin/sh
case "$*" in *--version*|*-dumpversion*) exec g++ "$@";; esac
echo "a.cpp:2:10: fatal error: Python.h: gone" >&2; exit 1
"""


def no_other_test_has_this(x: torch.Tensor) -> torch.Tensor:
    return torch.sinh(x * 0.8125) - 7.75


def compiled_with(compiler: str) -> None:
    rung.wrap(no_other_test_has_this, dynamic={"x": {0: "rows"}}, inductor={"cpp.cxx": (None, compiler)})(torch.ones(3, 5))


def test_a_missing_compiler_is_named_with_what_helps() -> None:
    with pytest.raises(CompileError, match=r"(?s)found no C\+\+ compiler to build piece 0 with.*hint: install one .*CXX.*RUNG_CACHE_DIR"):
        compiled_with("no-such-compiler-g++")


def test_what_a_compiler_says_is_in_the_message(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(BROKEN)
    compiler.chmod(0o755)
    with pytest.raises(CompileError, match=r"could not compile piece 0: .*fatal error: Python.h: gone"):
        compiled_with(str(compiler))


def uses_numpy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.from_numpy(x.numpy().copy())


class AssignsData(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data = self.seen.data + 1
        return x + self.seen


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (uses_numpy, r"NumPy's copy at .*test_compile_errors.py:\d+ \(return x \+ torch.from_numpy.*hint: use torch's operations"),
        (AssignsData(), r"an assignment to `.data` at .*test_compile_errors.py:\d+ \(self.seen.data = .*hint: .*copy_"),
    ],
    ids=["numpy", "data"],
)
def test_what_nothing_can_be_stored_of_is_named_with_its_line(target: Any, text: str) -> None:
    wrapped, eager = rung.wrap(copy.deepcopy(target), dynamic={"x": {0: "rows"}}), copy.deepcopy(target)
    if isinstance(target, AssignsData) and torch.__version__ >= "2.14":  # it has a call for it that can be stored
        for rows in (3, 5, 1):
            x = torch.randn(rows, 4)
            assert torch.equal(wrapped(x), eager(x))
        return
    with pytest.raises(CompileError, match=f"(?s)forward has {text}"):
        wrapped(torch.ones(3, 4))


def rows_as_a_tensor(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) / torch.tensor(x.shape[0], dtype=x.dtype) + torch.tensor([x.shape[0], x.shape[1]]).sum()


def test_a_size_may_become_a_tensor() -> None:
    function = rung.wrap(rows_as_a_tensor, dynamic={"x": {0: "rows"}})
    for rows in (3, 1, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(function(x), rows_as_a_tensor(x))
    assert function.rung.counters["dynamo_traces"] == 1


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.", "C"),
        ("InvalidCxxCompiler: Compiler: g++ is not found.", "C++"),
        ("it is too large", ""),
    ],
)
def test_a_missing_compiler_is_known_by_its_text_below_other_errors(text: str, language: str) -> None:
    outer = RuntimeError("a worker failed")
    outer.__cause__ = RuntimeError(text)
    assert torch_compat.missing_compiler(outer) == language
