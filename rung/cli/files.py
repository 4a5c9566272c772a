"""Files that options name: looked at before anything is loaded or run, and refused with the option's name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

from rung.errors import ConfigError


def check_writable(path: str | Path | None, option: str) -> None:
    """Raises `ConfigError` when no file can be written at `path`. Creates nothing."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{option}: {str(path)!r} cannot be written: there is no folder {folder!r}", hint="name a file in a folder that exists"
        )
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{option}: {str(path)!r} cannot be written: permission denied", hint="name a file in a folder of yours")


def write_text(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {str(path)!r} cannot be written: {error}", hint="name another file") from None


def read_text(file: IO[str], option: str) -> str:
    """The text of a file. Raises `ConfigError` when it is not UTF-8."""
    try:
        return file.read()
    except ValueError as error:
        raise ConfigError(f"{option}: {file.name!r} is no text in UTF-8: {error}", hint="save the file as UTF-8") from None


def read_json_text(file: IO[str], option: str) -> str:
    """The text of a JSON file, as it is. Raises `ConfigError` when it is no JSON."""
    text = read_text(file, option)
    try:
        json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {file.name!r} is no JSON: {error}", hint="name a file with one JSON object") from None
    return text
