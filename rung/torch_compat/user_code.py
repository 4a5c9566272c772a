"""Which source files are the user's, and how a place in them is shown."""

from __future__ import annotations

from pathlib import PurePath

import torch

_NOT_USER_CODE = (PurePath(torch.__file__).parent, PurePath(__file__).parents[1])


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to torch nor to rung."""
    return not any(PurePath(filename).is_relative_to(package) for package in _NOT_USER_CODE)


def place(filename: str, line: int | None, code: str) -> str:
    """` at file:line (code)`, to be put behind a message."""
    return f" at {filename}:{line} ({code.strip()})"
