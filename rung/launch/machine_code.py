"""What of a kernel's machine code runs: equal for builds that differ only in where their sources lay, which debuggers and the texts of
assertions tell."""

from __future__ import annotations

import hashlib
import struct

_ELF = b"\x7fELF\x02\x01"  # 64 bits, little endian
_RUNS = (".text", ".nv.info", ".nv.constant")  # instructions, what a launch needs of them, constants
_NO_BITS = 8  # type of a section that has no bytes in the file


def code_digest(cubin: bytes) -> str:
    """Hash of the sections of an ELF file that run; of all bytes where it is no such file (System V ABI, ELF-64)."""
    hasher = hashlib.sha256()
    try:
        for name, data in _sections(cubin):
            if name.startswith(_RUNS):
                hasher.update(name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)
    except (struct.error, ValueError, IndexError):
        return hashlib.sha256(cubin).hexdigest()
    return hasher.hexdigest()


def _sections(cubin: bytes) -> list[tuple[str, bytes]]:
    """(name, bytes) of every section. Raises `ValueError` and others for what is no ELF file."""
    if not cubin.startswith(_ELF):
        raise ValueError("no ELF file")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + index * size) for index in range(count)]  # name, type, -, -, offset, size
    texts = cubin[headers[names][4] : headers[names][4] + headers[names][5]]
    found = []
    for name, kind, _, _, offset, length in headers:
        text = texts[name : texts.index(b"\0", name)].decode()
        found.append((text, b"" if kind == _NO_BITS else cubin[offset : offset + length]))
    return found
