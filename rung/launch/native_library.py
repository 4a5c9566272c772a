"""Functions of shared libraries that a piece for CPUs calls, loaded from bytes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rung.errors import LaunchError
from rung.torch_compat import tensor_address_protocol

_ENTRY = "kernel"  # the function, and the module, of each library that Inductor makes


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """The instruction sets of this CPU, as the kernel of the system names them; empty where it does not."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip().lower() in ("flags", "features"):
                    return tuple(sorted(value.split()))
    except OSError:
        pass
    return ()


def load_function(data: bytes, digest: str) -> Callable[..., Any]:
    """The function of a library. The bytes are written to a file of their own, which is removed once it is mapped: its name is new, since
    loaders take equal names for equal libraries. Raises `LaunchError` when the system refuses it."""
    with tempfile.TemporaryDirectory(prefix="rung-") as folder:
        path = Path(folder) / f"{digest[:16]}.so"
        path.write_bytes(data)
        name = f"rung_piece_{digest[:16]}.{_ENTRY}"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        try:
            with tensor_address_protocol():
                module = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
        except ImportError as error:
            raise LaunchError(f"a compiled library cannot be loaded: {error}", hint="it is built again by torch") from error
    found: Callable[..., Any] = getattr(module, _ENTRY)
    return found
