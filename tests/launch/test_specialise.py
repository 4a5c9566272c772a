from __future__ import annotations

import pytest
import torch

from rung.errors import KernelArgumentError
from rung.launch.specialise import specialise
from rung.torch_compat import TritonParameter
from tests.launch.fakes import FakeTensor

PLAIN = TritonParameter("p", constexpr=False, by_value=True, by_alignment=True)
UNALIGNED = TritonParameter("p", constexpr=False, by_value=True, by_alignment=False)
FREE = TritonParameter("p", constexpr=False, by_value=False, by_alignment=False)

CASES = [
    (PLAIN, FakeTensor(4096), ("*fp32", "D")),
    (PLAIN, FakeTensor(4100), ("*fp32", "")),
    (UNALIGNED, FakeTensor(4096), ("*fp32", "")),
    (PLAIN, FakeTensor(4096, torch.bfloat16), ("*bf16", "D")),
    (PLAIN, FakeTensor(4096, torch.bool), ("*u1", "D")),
    (PLAIN, FakeTensor(4096, torch.int64), ("*i64", "D")),
    (PLAIN, 1, ("constexpr", 1)),
    (UNALIGNED, 1, ("constexpr", 1)),
    (FREE, 1, ("i32", None)),
    (PLAIN, 16, ("i32", "D")),
    (UNALIGNED, 16, ("i32", "")),
    (FREE, 16, ("i32", None)),
    (PLAIN, 0, ("i32", "D")),
    (PLAIN, -1, ("i32", "")),
    (PLAIN, 2**31 - 1, ("i32", "")),
    (PLAIN, 2**31, ("i64", "D")),
    (PLAIN, -(2**31) - 1, ("i64", "")),
    (PLAIN, 2**63, ("u64", "D")),
    (PLAIN, 1.5, ("fp32", None)),
    (PLAIN, True, ("u1", None)),
]


@pytest.mark.parametrize(("parameter", "value", "expected"), CASES)
def test_the_rules(parameter: TritonParameter, value: object, expected: tuple[str, object]) -> None:
    found = specialise([parameter], [value], {})
    kind, hint = expected
    assert found.kinds == ({} if kind == "constexpr" else {"p": kind})
    assert found.constants == ({"p": 1} if kind == "constexpr" else {})
    assert found.divisible_by_16 == (("p",) if hint == "D" else ())


@pytest.mark.parametrize(("parameter", "value", "expected"), CASES)
def test_the_rules_are_tritons(parameter: TritonParameter, value: object, expected: tuple[str, object]) -> None:
    libtriton = pytest.importorskip("triton._C.libtriton")
    from triton.backends.nvidia.compiler import CUDABackend

    if parameter is FREE or parameter is PLAIN:
        aligned = parameter is PLAIN
        assert libtriton.native_specialize_impl(CUDABackend, value, False, parameter.by_value, aligned) == expected
    else:
        assert libtriton.native_specialize_impl(CUDABackend, value, False, True, False) == expected


def test_constexprs_are_constants() -> None:
    block = TritonParameter("BLOCK", constexpr=True, by_value=True, by_alignment=True)
    assert specialise([PLAIN, block], [5], {"BLOCK": 64}).constants == {"BLOCK": 64}


@pytest.mark.parametrize("value", [None, "text", 2**64, FakeTensor(0, torch.complex64)])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(KernelArgumentError):
        specialise([PLAIN], [value], {})
