from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from rung.errors import KernelArgumentError
from rung.launch.image import Parameter
from rung.launch.packing import ParameterBuffer, bf16_bits

KINDS = ("i1", "*bf16", "i32", "i64", "fp32", "i1", "i16", "fp64", "bf16", "fp16")


def buffer_of(*kinds: str, table: list[int] | None = None) -> ParameterBuffer:
    return ParameterBuffer([Parameter(f"p{index}", kind) for index, kind in enumerate(kinds)], table)


def read(buffer: ParameterBuffer, count: int, sizes: list[int]) -> list[bytes]:
    table = (ctypes.c_void_p * count).from_address(buffer.table_address)
    return [ctypes.string_at(address or 0, size) for address, size in zip(table, sizes, strict=True)]


def test_each_parameter_is_aligned_to_its_size() -> None:
    assert buffer_of(*KINDS).offsets == [0, 8, 16, 24, 32, 36, 38, 40, 48, 50]


def test_the_table_points_to_aligned_memory() -> None:
    buffer = buffer_of(*KINDS)
    table = (ctypes.c_void_p * len(KINDS)).from_address(buffer.table_address)
    assert [(address or 0) % parameter.size for address, parameter in zip(table, buffer.parameters, strict=True)] == [0] * len(KINDS)


def test_values_of_every_kind() -> None:
    buffer = buffer_of(*KINDS)
    buffer.set_all([True, 2**63 + 5, -7, -(2**40), 0.1, 0, -3, 0.1, 1.0, 0.5])
    found = read(buffer, len(KINDS), [p.size for p in buffer.parameters])
    expected = [
        b"\1", struct.pack("<Q", 2**63 + 5), struct.pack("<i", -7), struct.pack("<q", -(2**40)), struct.pack("<f", 0.1), b"\0",
        struct.pack("<h", -3), struct.pack("<d", 0.1), b"\x80\x3f", struct.pack("<e", 0.5),
    ]  # fmt: skip
    assert found == expected


def test_set_changes_one_parameter_in_place() -> None:
    buffer = buffer_of("*fp32", "i32", "i32")
    buffer.set_all([64, 1, 2])
    before = buffer.table_address
    buffer.set(1, 9)
    assert read(buffer, 3, [8, 4, 4]) == [struct.pack("<Q", 64), struct.pack("<i", 9), struct.pack("<i", 2)]
    assert buffer.table_address == before


def test_the_table_may_leave_parameters_out() -> None:
    buffer = buffer_of("i32", "i64", "i32", table=[2, 0])
    buffer.set_all([1, 2, 3])
    assert read(buffer, 2, [4, 4]) == [struct.pack("<i", 3), struct.pack("<i", 1)]


def test_scratch_is_null_and_no_value() -> None:
    buffer = ParameterBuffer([Parameter("a", "i32"), Parameter("global_scratch", "global_scratch")])
    buffer.set_all([5])
    assert read(buffer, 2, [4, 8]) == [struct.pack("<i", 5), bytes(8)]


@pytest.mark.parametrize("value", [0.0, 1.0, -1.5, 3.14159, 1e30, 1e-40, 65504.0, float("inf"), -float("inf")])
def test_bf16_rounds_as_torch_does(value: float) -> None:
    assert bf16_bits(value) == torch.tensor(value).to(torch.bfloat16).view(torch.int16).item() & 0xFFFF


def test_bf16_nan_stays_nan() -> None:
    assert torch.tensor(bf16_bits(float("nan"))).to(torch.int16).view(torch.bfloat16).isnan().item()


def test_wrong_number_of_values() -> None:
    with pytest.raises(KernelArgumentError, match=r"1 values for 2 parameters \(p0, p1\)"):
        buffer_of("i32", "i32").set_all([1])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("i32", 2**31),
        ("i64", 2**63),
        ("i32", 1.5),
        ("*fp32", -1),
        ("fp32", "x"),
        ("fp32", 1e300),
        ("bf16", 1e300),
        pytest.param("bf16", 10**400, id="a large integer"),
        ("bf16", "x"),
        pytest.param("i64", 10**5000, id="a long integer"),
        ("i1", 2),
        ("i1", 255),
        ("u1", -1),
    ],
)
def test_a_value_that_does_not_fit_is_named(kind: str, value: float) -> None:
    with pytest.raises(KernelArgumentError, match=r"argument 1 \(p1\)"):
        buffer_of("i32", kind).set_all([1, value])
    with pytest.raises(KernelArgumentError, match=r"argument 1 \(p1\)"):
        buffer_of("i32", kind).set(1, value)
