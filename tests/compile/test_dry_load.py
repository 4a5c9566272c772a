"""Artifacts for a GPU that is not here, up to a dry load: built by a child process, run on a driver that records launches.

Needs torch's CUDA build, and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.cache import Store
from rung.compile.artifact import Artifact, PieceLoader
from rung.counters import Counters
from rung.launch import FirstConfig, KernelImage, MeasuredChoices, ProgramKernel
from rung.launch.choices import choice_entry
from rung.launch.tuning_file import tuning_of
from rung.torch_compat import GPUS
from tests.launch.fakes import FakeDriver

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build")]
ROOT = Path(__file__).parents[2]


def precompile(target: str, store: Path, *more: str, **variables: str) -> dict[str, Any]:
    words = ("precompile", "tiny", "--target", target, "--dtype", "bfloat16", "--requests", "4", "--out", str(store), "--json", *more)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-m", "rung.cli", *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    return dict(result)


@pytest.mark.parametrize("target", sorted(GPUS))
def test_every_piece_for_every_target_loads_without_a_compiler(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = precompile(target, tmp_path)
    assert (result["cache"], result["unique_pieces"], result["run_on_device"]) == ("miss", 3, GPUS[target].measured)
    store = Store(tmp_path)
    capability = 10 * GPUS[target].capability[0] + GPUS[target].capability[1]
    images: dict[str, KernelImage] = {}
    artifacts = [Artifact.from_bytes(store.get_blob(manifest.blobs[0])) for _, manifest in store.manifests("pieces")]
    monkeypatch.setattr("rung.launch.piece_runtime.wrapper_names", lambda ordinal: {"ordinal": ordinal})
    driver = FakeDriver(images)
    for artifact in artifacts:
        assert artifact.program is not None, artifact.detail
        for kernel in artifact.program.kernels.values():
            for config in kernel.configs:
                image = KernelImage.from_bytes(store.get_blob(config.image))
                assert image.capability == capability
                images[image.entry] = image
        call, refused = PieceLoader(torch.device("cuda", 1), store.get_blob, driver=driver).bind(artifact, FirstConfig())
        assert refused is None
        assert callable(call)
    assert any(artifact.program.kernels for artifact in artifacts if artifact.program is not None)
    assert {name for name, *_ in driver.calls} <= {"load", "allow_shared"}
    assert all(ordinal == 1 for _, ordinal, *_ in driver.calls)


def test_a_choice_recorded_elsewhere_is_taken(tmp_path: Path) -> None:
    """Two builds in other folders; the first one's device measured, the second one is given the file."""
    for folder in ("first", "second"):
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / folder / "triton")}
        precompile("h200", tmp_path / folder / "store", *tuning_words(tmp_path), **caches)
        store = Store(tmp_path / folder / "store")
        kernels = tunable(store)
        assert kernels
        chooser = MeasuredChoices(store, GPUS["h200"].name, Counters())
        if folder == "first":
            for kernel in kernels:
                codes = [config.code for config in kernel.configs]
                store.put(choice_entry(codes, GPUS["h200"].name, codes[1], [2.0, 1.0]))
            (tmp_path / "tuning.json").write_text(json.dumps(tuning_of(store)))
        assert [chooser.known(kernel) for kernel in kernels] == [1] * len(kernels)


def tuning_words(folder: Path) -> tuple[str, ...]:
    return ("--tuning", str(folder / "tuning.json")) if (folder / "tuning.json").exists() else ()


def tunable(store: Store) -> list[ProgramKernel]:
    programs = [Artifact.from_bytes(store.get_blob(manifest.blobs[0])).program for _, manifest in store.manifests("pieces")]
    return [kernel for program in programs if program is not None for kernel in program.kernels.values() if len(kernel.configs) > 1]
