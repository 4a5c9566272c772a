"""The GGUF container: metadata and tensor directory. Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian.

Read here with `struct` because the reader of the gguf package spends seconds on the vocabulary; block formats are left to that package.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rung.errors import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value type -> struct code
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # rows first, as torch has it
    block_type: int  # a ggml type number
    offset: int  # bytes from the start of the data section


class GGUFFile:
    """`metadata` by key and `tensors` by name. The file stays mapped while this object lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: npt.NDArray[np.uint8] = _map(path)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, MemoryError) as problem:
            raise ModelLoadError(f"{path} is damaged near byte {self._at}: {problem!r}", hint="download the file again") from problem

    def blocks(self, entry: TensorEntry) -> npt.NDArray[np.float32]:
        """The tensor's values, dequantised to fp32, in `entry.shape`."""
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(entry.block_type)
        except ValueError:
            raise ModelLoadError(
                f"tensor {entry.name!r} in {self.path} has the unknown block type {entry.block_type}", hint="update the gguf package"
            ) from None
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = entry.shape[-1] // block_size * block_bytes
        start = self._data_start + entry.offset
        raw = self._data[start : start + row_bytes * int(np.prod(entry.shape[:-1], dtype=np.int64))]
        try:
            values = gguf.dequantize(raw.reshape(*entry.shape[:-1], row_bytes), kind)
            return np.asarray(values, dtype=np.float32).reshape(entry.shape)
        except NotImplementedError:
            hint = "use a file with Q4_0 to Q8_0, K-quant, F16, BF16 or F32 tensors"
            raise ModelLoadError(f"tensor {entry.name!r} in {self.path} has the unsupported block type {kind.name}", hint=hint) from None
        except ValueError as problem:
            raise ModelLoadError(
                f"tensor {entry.name!r} in {self.path} is cut short: {problem}", hint="download the file again"
            ) from problem

    def _parse(self) -> None:
        if bytes(self._data[:4]) != b"GGUF":
            raise ModelLoadError(f"{self.path} is no GGUF file", hint="give a .gguf file or a folder with safetensors weights")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} has GGUF version {version}, expected 2 or 3", hint="convert the file to version 3")
        tensor_count, value_count = self._scalar("Q"), self._scalar("Q")
        for _ in range(value_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        for _ in range(tensor_count):
            entry = self._tensor_entry()
            self.tensors[entry.name] = entry
        alignment = int(self.metadata.get("general.alignment", 32))
        self._data_start = -(-self._at // alignment) * alignment

    def _tensor_entry(self) -> TensorEntry:
        name = self._string()
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return TensorEntry(name, tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if item in (_STRING, _ARRAY):
            return [self._value(item) for _ in range(count)]
        return list(self._unpack(f"<{count}{_SCALARS[item]}"))

    def _string(self) -> str:
        size = self._scalar("Q")
        end = self._at + size
        if end > self._data.size:
            raise ValueError("a string runs past the end of the file")
        text = self._data[self._at : end].tobytes().decode("utf-8")
        self._at = end
        return text

    def _scalar(self, code: str) -> Any:
        return self._unpack("<" + code)[0]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data.data, self._at)
        self._at += struct.calcsize(layout)
        return values


def _map(path: Path) -> npt.NDArray[np.uint8]:
    try:
        # a plain view of the mapping: slicing a memmap object itself is slow
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).view(np.ndarray)
    except (OSError, ValueError) as problem:
        raise ModelLoadError(f"cannot read {path}: {problem}", hint="check the path and its permissions") from problem
