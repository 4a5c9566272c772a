"""What is said when Inductor cannot build a piece."""

from __future__ import annotations

from pathlib import Path

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
