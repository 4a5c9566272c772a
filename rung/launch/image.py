"""A compiled kernel as bytes: the machine code and all that a launch must know of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rung.errors import ArtifactError

_MAGIC = b"RUNGKERNEL"
_VERSION = 1
_DIGEST_BYTES = hashlib.sha256().digest_size

GLOBAL_SCRATCH = "global_scratch"
PROFILE_SCRATCH = "profile_scratch"

# Bytes of a scalar parameter; every other kind is an address.
SCALAR_BYTES = {
    "i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8,
    "fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8,
    "tensormap": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a compiled kernel.

    `kind` is a scalar ("i32", "fp32", ...), a "tensormap" (128 bytes by value), a pointer with what it points to ("*bf16"),
    or one of the two scratch areas."""

    name: str
    kind: str

    def __post_init__(self) -> None:
        if not (self.kind in SCALAR_BYTES or self.is_pointer or self.is_scratch):
            raise ArtifactError(f"parameter {self.name!r} has the unknown kind {self.kind!r}", hint=f"known are {sorted(SCALAR_BYTES)}")

    @property
    def is_pointer(self) -> bool:
        return self.kind.startswith("*")

    @property
    def is_scratch(self) -> bool:
        return self.kind in (GLOBAL_SCRATCH, PROFILE_SCRATCH)

    @property
    def size(self) -> int:
        """Bytes; a parameter is aligned to its size."""
        return SCALAR_BYTES.get(self.kind, 8)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that a kernel needs for itself: bytes for each block of the grid."""

    size: int = 0
    alignment: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImage:
    """A kernel for one kind of device. `parameters` are those that the machine code has, in its order; what a compiler's specialisation
    removed is not among them."""

    cubin: bytes = field(repr=False)
    entry: str
    capability: int  # 90: the machine code is for compute capability 9.0
    parameters: tuple[Parameter, ...]
    num_warps: int
    shared_bytes: int = 0  # dynamic shared memory
    cluster: tuple[int, int, int] = (1, 1, 1)  # blocks of a cluster; the grid of a launch counts clusters
    cooperative: bool = False
    programmatic: bool = False  # waits for its predecessor itself (programmatic dependent launch)
    global_scratch: Scratch = Scratch()
    profile_scratch: Scratch = Scratch()

    @property
    def arguments(self) -> tuple[Parameter, ...]:
        """The parameters that a caller gives: all but scratch."""
        return tuple(parameter for parameter in self.parameters if not parameter.is_scratch)

    def to_bytes(self) -> bytes:
        """Self-checking bytes without pickle: magic, hash, length of the header, JSON header, machine code."""
        header = json.dumps({"version": _VERSION, **{f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "cubin"}})
        encoded = header.encode()
        body = len(encoded).to_bytes(4, "little") + encoded + self.cubin
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> KernelImage:
        """The image of `to_bytes`. Raises `ArtifactError` for what is no bytes, damaged, or of another version."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArtifactError(f"a kernel image is bytes, got {type(data).__name__}", hint="pass what to_bytes() gave")
        data = bytes(data)
        start = len(_MAGIC) + _DIGEST_BYTES
        body = data[start:]
        if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
            raise ArtifactError("these bytes are no kernel image, or a damaged one", hint="export the kernel again")
        length = int.from_bytes(body[:4], "little")
        header: dict[str, Any] = json.loads(body[4 : 4 + length])
        if (version := header.pop("version", None)) != _VERSION:
            raise ArtifactError(f"the kernel image has format {version}, expected {_VERSION}", hint="export the kernel again")
        header["parameters"] = tuple(Parameter(**parameter) for parameter in header["parameters"])
        header["cluster"] = tuple(header["cluster"])
        for name in (GLOBAL_SCRATCH, PROFILE_SCRATCH):
            header[name] = Scratch(**header[name])
        return cls(cubin=body[4 + length :], **header)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return asdict(value) if isinstance(value, Parameter | Scratch) else value
