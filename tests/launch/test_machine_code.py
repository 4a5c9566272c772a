"""What of a cubin runs."""

from __future__ import annotations

import hashlib
import struct

from rung.launch.machine_code import code_digest


def elf(**sections: bytes) -> bytes:
    """A file with these sections, `_` standing for the dot of a name."""
    names = ["", *(name.replace("_", ".", 1) for name in sections), ".shstrtab"]
    texts = b"\0".join(name.encode() for name in names) + b"\0"
    body, headers, offset, at = b"", [], 0x40, 0
    for name, data in zip(names, [b"", *sections.values(), texts], strict=True):
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, offset + len(body), len(data), 0, 0, 1, 0))
        body, at = body + data, at + len(name) + 1
    head = b"\x7fELF\x02\x01" + bytes(0x22) + struct.pack("<Q", offset + len(body)) + bytes(0x0A)
    return head + struct.pack("<HHH", 64, len(headers), len(headers) - 1) + body + b"".join(headers)


def test_paths_do_not_count_and_instructions_do() -> None:
    one = elf(_text=b"add", _debug=b"/home/a/kernel.py", _symtab=b"1")
    assert code_digest(one) == code_digest(elf(_text=b"add", _debug=b"/somewhere/else/kernel.py", _symtab=b"22"))
    assert code_digest(one) != code_digest(elf(_text=b"sub", _debug=b"/home/a/kernel.py", _symtab=b"1"))


def test_bytes_of_another_kind_count_as_a_whole() -> None:
    for data in (b"", b"code", b"\x7fELF\x02\x01 cut off"):
        assert code_digest(data) == hashlib.sha256(data).hexdigest()
