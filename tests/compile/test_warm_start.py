"""A warm process on a CPU: no compiler is imported, none is needed, and the numbers are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rung.cache import Store
from rung.compile.artifact import Artifact
from rung.counters import Count

ROOT = Path(__file__).parents[2]


def start(device: str = "cpu", *more: str, **environment: str) -> dict[str, Any]:
    """What `warm_child` printed in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.warm_child", device, *more],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def elsewhere(tmp_path: Path) -> dict[str, str]:
    """Another machine: empty caches of torch, no compiler on the path, another home."""
    (tmp_path / "home").mkdir()
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    return {**folders, "PATH": str(tmp_path / "nothing"), "HOME": str(tmp_path / "home"), "CXX": "", "RUNG_REQUIRE_HIT": "1"}


def test_a_warm_process_imports_no_compiler_and_needs_none(tmp_path: Path) -> None:
    cold = start()
    assert cold["counters"][Count.INDUCTOR_COMPILES] == 1
    assert "torch._inductor" in cold["imported"]  # the check below can fail
    warm = start(**elsewhere(tmp_path))
    assert warm["imported"] == []
    assert warm["outputs"] == cold["outputs"]  # bit by bit
    assert warm["error"] < 1e-5
    assert warm["counters"][Count.PROGRAM_LOADS] == warm["counters"][Count.ARTIFACT_LOADS] == 1
    assert not {Count.INDUCTOR_COMPILES, Count.DYNAMO_TRACES, Count.PLAN_MISSES} & warm["counters"].keys()
    assert not (tmp_path / "inductor").exists()


@pytest.mark.slow
def test_a_warm_engine_imports_no_compiler(tmp_path: Path) -> None:
    cold = start("cpu", "engine")
    warm = start("cpu", "engine", **elsewhere(tmp_path))
    assert (warm["imported"], warm["outputs"]) == ([], cold["outputs"])
    assert warm["counters"][Count.PROGRAM_LOADS] == warm["counters"][Count.ARTIFACT_LOADS] == 3


def test_the_compiled_libraries_lie_in_the_store(rung_cache_dir: Path) -> None:
    start()
    store = Store(rung_cache_dir)
    ((_, manifest),) = store.manifests("pieces")
    artifact = Artifact.from_bytes(store.get_blob(manifest.blobs[0]))
    assert artifact.program is not None
    assert artifact.program.libraries
    assert all(store.get_blob(digest).startswith(b"\x7fELF") for digest in artifact.program.libraries.values())
    assert set(manifest.blobs) == {manifest.blobs[0], *artifact.blobs}
    ((_, plan),) = store.manifests("plans")
    assert set(plan.blobs) == set(manifest.blobs)  # so that an export and the budget see all of them
