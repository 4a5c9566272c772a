"""Functions of shared libraries, loaded from bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rung.errors import LaunchError
from rung.launch.native_library import cpu_flags, load_function


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(LaunchError, match="cannot be loaded"):
        load_function(b"no library", "0" * 64)


def test_instruction_sets_are_read_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: sse2 avx\nprocessor : 1\nflags : more\n")
    assert cpu_flags(path) == ("avx", "sse2")
    path.write_text("Features\t: fp asimd\n")
    assert cpu_flags(path) == ("asimd", "fp")
    assert cpu_flags(tmp_path / "missing") == ()
