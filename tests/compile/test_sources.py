from __future__ import annotations

import collections
import contextlib
import importlib
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from rung.compile.sources import SourceRef, code_digest, current_digest, source_refs, type_refs
from tests.compile.cases import Net, Output


def outer(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return y + 1

    outer.inner = inner  # type: ignore[attr-defined]
    return inner(x)


def test_method_is_found_again() -> None:
    (ref,) = source_refs([Net.forward.__code__])
    assert (ref.module, ref.qualname) == ("tests.compile.cases", "Net.forward")
    assert current_digest(ref) == ref.digest


def test_function_of_torch_is_covered_by_its_version() -> None:
    assert source_refs([torch.nn.Linear.forward.__code__]) == ()


def test_nested_function_is_covered_by_the_one_around_it() -> None:
    outer(torch.zeros(1))
    codes = [outer.__code__, outer.inner.__code__]  # type: ignore[attr-defined]
    assert [ref.qualname for ref in source_refs(codes)] == ["outer"]


def test_nested_function_alone_is_found_in_the_one_around_it() -> None:
    outer(torch.zeros(1))
    (ref,) = source_refs([outer.inner.__code__])  # type: ignore[attr-defined]
    assert (ref.qualname, current_digest(ref)) == ("outer", ref.digest)


def test_function_of_python_is_covered_by_its_version() -> None:
    codes = [os.environ.encodekey.__code__, contextlib.contextmanager.__code__, collections.Counter.update.__code__]
    assert source_refs([*codes, *(inner for inner in codes[1].co_consts if isinstance(inner, types.CodeType))]) == ()


def test_function_that_its_name_does_not_lead_to_is_found_in_the_text_of_the_module() -> None:
    (ref,) = source_refs([doubled.__code__])
    assert (ref.module, ref.qualname, current_digest(ref)) == (__name__, "", ref.digest)


def test_function_without_a_file_has_its_bytecode() -> None:
    codes = [types.FunctionType(compile(f"lambda x: x + {number}", "none", "eval").co_consts[0], {}).__code__ for number in (1, 2, 1)]
    first, second, third = map(code_digest, codes)
    assert first == third != second


def test_function_that_nothing_leads_to_is_never_found_again() -> None:
    (ref,) = source_refs([compile("lambda x: x", "none", "eval").co_consts[0]])
    assert (ref.name, current_digest(ref)) == ("<lambda>", None)


def test_file_that_was_edited_after_its_import_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for text in ("def f(x):\n    return x + 1\n", "def f(x):\n    return x + 200\n"):
        (tmp_path / "rung_test_edited.py").write_text(text)
        module = sys.modules.get("rung_test_edited") or importlib.import_module("rung_test_edited")
        digests.append(source_refs([module.f.__code__])[0].digest)
    del sys.modules["rung_test_edited"]
    importlib.import_module("rung_test_edited")
    assert current_digest(SourceRef("rung_test_edited", "f", "")) not in digests
    del sys.modules["rung_test_edited"]


@pytest.mark.parametrize("ref", [SourceRef("", "f", ""), SourceRef("no.such", "f", ""), SourceRef("tests.compile.cases", "gone", "")])
def test_function_that_is_gone(ref: SourceRef) -> None:
    assert current_digest(ref) is None


def test_class_of_an_output_counts() -> None:
    template = {"kind": "tuple", "items": [{"kind": "object", "type": "tests.compile.cases:Output", "items": []}]}
    (ref,) = type_refs(template)
    assert (ref.qualname, current_digest(ref)) == (Output.__qualname__, ref.digest)


doubled = lambda x: x * 2  # noqa: E731
FACTOR = 2.0


def reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def test_global_number_that_a_function_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = source_refs([reads_a_global.__code__])
    assert current_digest(ref) == ref.digest
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert current_digest(ref) != ref.digest
