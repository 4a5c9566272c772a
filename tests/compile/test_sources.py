from __future__ import annotations

import sys

import pytest
import torch

from rung.compile.sources import SourceRef, current_digest, source_refs, type_refs
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


def test_nested_function_alone_is_never_found_again() -> None:
    outer(torch.zeros(1))
    (ref,) = source_refs([outer.inner.__code__])  # type: ignore[attr-defined]
    assert current_digest(ref) is None


@pytest.mark.parametrize("ref", [SourceRef("", "f", ""), SourceRef("no.such", "f", ""), SourceRef("tests.compile.cases", "gone", "")])
def test_function_that_is_gone(ref: SourceRef) -> None:
    assert current_digest(ref) is None


def test_class_of_an_output_counts() -> None:
    template = {"kind": "tuple", "items": [{"kind": "object", "type": "tests.compile.cases:Output", "items": []}]}
    (ref,) = type_refs(template)
    assert (ref.qualname, current_digest(ref)) == (Output.__qualname__, ref.digest)


FACTOR = 2.0


def reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def test_global_number_that_a_function_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = source_refs([reads_a_global.__code__])
    assert current_digest(ref) == ref.digest
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert current_digest(ref) != ref.digest
