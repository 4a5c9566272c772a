"""Kernel parameters in one buffer: where each lies, how values become bytes, and the address table that a launch takes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from rung.errors import KernelArgumentError
from rung.launch.image import Parameter

# `struct` codes; bf16 has none and travels as its upper 16 bits.
_CODES = {
    "i1": "B", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp16": "e", "bf16": "H", "fp32": "f", "f32": "f", "fp64": "d", "tensormap": "128s",
}  # fmt: skip
_ADDRESS = "Q"
_TRUTHS = ("i1", "u1")


def code_of(parameter: Parameter) -> str:
    return _CODES.get(parameter.kind, _ADDRESS)


def bf16_bits(value: float) -> int:
    """The 16 bits of a number in bfloat16, rounded to nearest even."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    if value != value:
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


class ParameterBuffer:
    """Owns the bytes of all parameters of one launch and the table of their addresses (`void**`).

    Each parameter lies aligned to its size. `table` names those that the table lists, by index and in its order; None: all of them.
    Scratch counts as a parameter but not as a value of `set_all`, which leaves it null. Written by one thread at a time; a launch has read
    the bytes when it returns."""

    def __init__(self, parameters: Sequence[Parameter], table: Sequence[int] | None = None) -> None:
        self.parameters = tuple(parameters)
        self.offsets: list[int] = []
        codes, end = [], 0
        for parameter in self.parameters:
            start = -(-end // parameter.size) * parameter.size
            codes.append("x" * (start - end) + ("8x" if parameter.is_scratch else code_of(parameter)))
            self.offsets.append(start)
            end = start + parameter.size
        self._all = struct.Struct("<" + "".join(codes))
        self._each = [struct.Struct("<" + code_of(parameter)) for parameter in self.parameters]
        self.bytes = (ctypes.c_uint64 * max(1, -(-end // 8)))()  # of 64-bit words, so that it starts aligned
        start_address = ctypes.addressof(self.bytes)
        listed = [start_address + self.offsets[index] for index in (range(len(self.offsets)) if table is None else table)]
        self._addresses = (ctypes.c_void_p * max(1, len(listed)))(*listed)
        self._values = [parameter for parameter in self.parameters if not parameter.is_scratch]
        self.pack_into = self._all.pack_into  # (bytes, 0, *values): the fast way, which raises struct.error or OverflowError

    @property
    def table_address(self) -> int:
        """Address of the table; valid as long as this object lives."""
        return ctypes.addressof(self._addresses)

    def set_all(self, values: Sequence[float]) -> None:
        """Write all values in order; addresses are ints. Raises `KernelArgumentError` for their number, or one that does not fit."""
        if len(values) != len(self._values):
            names = ", ".join(parameter.name for parameter in self._values)
            raise KernelArgumentError(
                f"{len(values)} values for {len(self._values)} parameters ({names})", hint="give one value for each parameter"
            )
        slots = [index for index, parameter in enumerate(self.parameters) if not parameter.is_scratch]
        for index, value in zip(slots, values, strict=True):
            self.set(index, value)

    def set(self, index: int, value: float) -> None:
        """Write parameter `index`. Raises `KernelArgumentError` for a value that does not fit, and writes nothing then."""
        parameter = self.parameters[index]
        try:
            self._each[index].pack_into(self.bytes, self.offsets[index], _code(parameter, value))
        except (struct.error, OverflowError) as error:
            raise KernelArgumentError(
                f"argument {index} ({parameter.name}) is {_shown(value)}, which does not fit {parameter.kind}: {error}",
                hint="pass a number of that kind, or export the kernel for the wider one",
            ) from error


def _code(parameter: Parameter, value: float) -> float:
    """What `struct` is given for a value. Raises OverflowError or struct.error, as `struct` itself does."""
    if parameter.kind == "bf16":
        return bf16_bits(value)
    if parameter.kind in _TRUTHS and value not in (0, 1):
        raise OverflowError("expected 0 or 1")
    return value


def _shown(value: object) -> str:
    """A value in an error message; Python refuses to write an integer of many thousand digits."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else repr(value)
