"""What every test gets: caches of its own, seeds, a fixed thread count, and no forward context left over from another test.

The environment is set while this file is imported, before any test module imports torch: Inductor and OpenMP read it once.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would download something fails at once instead
os.environ["TOKENIZERS_PARALLELISM"] = "false"

_session_dir = tempfile.TemporaryDirectory(prefix="rung-tests-", ignore_cleanup_errors=True)
_inductor_dir = Path(os.environ.get("RUNG_TEST_INDUCTOR_DIR") or Path(_session_dir.name, "inductor"))
_inductor_dir.mkdir(parents=True, exist_ok=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_inductor_dir)
os.environ["TRITON_CACHE_DIR"] = str(_inductor_dir / "triton")

import numpy as np  # noqa: E402  (the environment comes first)
import pytest  # noqa: E402
import torch  # noqa: E402

from rung.context import find_forward_context  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_unconfigure() -> None:
    _session_dir.cleanup()


@pytest.fixture(scope="session")
def inductor_dir() -> Path:
    """The Inductor directory that the tests of this session share."""
    return _inductor_dir


@pytest.fixture(autouse=True)
def rung_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The artifact store of this test: an empty folder that no other test sees. Subprocesses of the test inherit it."""
    directory = tmp_path / "rung-cache"
    monkeypatch.setenv("RUNG_CACHE_DIR", str(directory))
    return directory


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_forward_context_left() -> Iterator[None]:
    yield
    assert (left := find_forward_context()) is None, f"the test left a forward context set: {left}"
