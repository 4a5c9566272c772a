"""Other versions of Python and torch than those that rung is for."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from rung import versions
from rung.errors import UnsupportedVersionError

ROOT = Path(__file__).parents[1]


def imported(path: Path, code: str = "") -> str:
    """What `import rung` ends with in a new interpreter that finds modules at `path` first."""
    script = (
        f"import sys\nsys.path[:0] = [{str(path)!r}, {str(ROOT)!r}]\n{code}\nimport rung\nassert 'torch' not in sys.modules or {bool(code)}"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return result.stderr


def fake_torch(folder: Path, version: str) -> Path:
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from torch.version import __version__")
    (package / "version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n")
    return folder


@pytest.mark.parametrize("code", ["", "import torch"], ids=["found", "loaded"])
@pytest.mark.parametrize(
    ("version", "text"),
    [
        (
            "2.1.0",
            'UnsupportedVersionError: rung is for torch 2.11 to 2.14, and this is torch 2.1\nhint: pip install "torch>=2.11,<2.15"\n',
        ),
        (
            "2.15.0.dev20270101+cu130",
            "RuntimeWarning: rung is for torch 2.11 to 2.14, and this is torch 2.15, with which it was not tested",
        ),
        ("2.11.0+cu130", ""),
        ("of my own", ""),
    ],
)
def test_importing_rung_tells_of_another_torch(code: str, version: str, text: str, tmp_path: Path) -> None:
    said = imported(fake_torch(tmp_path, version), code)
    assert text in said
    assert bool(said) == bool(text)


def test_importing_rung_tells_of_an_old_python(tmp_path: Path) -> None:
    said = imported(tmp_path, "import enum\ndel enum.StrEnum\nsys.version_info = (3, 10, 4)")
    assert "UnsupportedVersionError: rung is for Python 3.11 to 3.13, and this is Python 3.10\nhint: " in said


def test_a_refusal_is_an_import_error() -> None:
    assert issubclass(UnsupportedVersionError, ImportError)


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest, newest), (old, new) = versions.PYTHON, versions.TORCH
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert f"torch>={old[0]}.{old[1]},<{new[0]}.{new[1] + 1}" in project["dependencies"]


def test_the_installed_torch_is_found_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = versions._torch_version()
    monkeypatch.delitem(sys.modules, "torch")
    assert versions._torch_version() == loaded == tuple(map(int, torch.__version__.split(".")[:2]))
