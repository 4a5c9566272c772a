"""Which versions of Python and torch rung is for. Looked at by `import rung`, so this file runs on old ones and imports no torch."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from importlib.util import find_spec

PYTHON = ((3, 11), (3, 13))  # oldest and newest, as in pyproject.toml
TORCH = ((2, 11), (2, 14))


def check_versions() -> None:
    """Raises `UnsupportedVersionError` for versions that are too old, and warns of newer ones than rung was tested with."""
    _check("Python", sys.version_info[:2], PYTHON, "use one of them")
    found = _torch_version()
    if found is not None:
        _check("torch", found, TORCH, 'pip install "torch>={}.{},<{}.{}"'.format(*TORCH[0], TORCH[1][0], TORCH[1][1] + 1))


def _check(name: str, found: tuple[int, ...], known: tuple[tuple[int, int], tuple[int, int]], hint: str) -> None:
    oldest, newest = known
    text = f"rung is for {name} {_dotted(oldest)} to {_dotted(newest)}, and this is {name} {_dotted(found)}"
    if found < oldest:
        from rung.errors import UnsupportedVersionError

        raise UnsupportedVersionError(text, hint=hint)
    if found > newest:
        warnings.warn(f"{text}, with which it was not tested (`rung doctor` says what is missing)", RuntimeWarning, stacklevel=3)


def _torch_version() -> tuple[int, ...] | None:
    """Major and minor of the torch that is loaded or would be, from its `version.py`. None where they cannot be told."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return _major_and_minor(str(loaded))
    try:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            found = [line.split("=")[1].strip(" '\"\n") for line in file if line.startswith("__version__")]
    except (OSError, ValueError, ImportError):
        return None
    return _major_and_minor(found[0]) if found else None


def _major_and_minor(version: str) -> tuple[int, ...] | None:
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else None


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
