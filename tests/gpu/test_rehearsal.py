"""No step of a runner on the device asks for a kernel that its start did not load, nor one on a store that was built without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.attention.backends import decode_attention, rotary_write, triton_paged
from rung.cache import use_store
from rung.launch import TritonLauncher, launch_road
from rung.models import random_model
from rung.passes.kernels import launches
from rung.runner import RunnerConfig, SamplingParams, build_engine
from rung.runner.ops import triton_decode, triton_ops, triton_sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or launch_road() != "prebound", reason="needs a CUDA device and prebound launches"),
]
MODULES = (triton_decode, triton_ops, triton_sample, rotary_write, triton_paged, decode_attention, launches)


def loaded() -> dict[str, int]:
    """Loaded images by kernel, over this process."""
    found = [value for module in MODULES for value in vars(module).values() if isinstance(value, TritonLauncher)]
    return {launcher.name: len(launcher.loaded) for launcher in found}


@pytest.mark.parametrize("graphs", ["none", "piecewise", "full_and_piecewise"])
def test_steps_load_nothing_after_the_start(graphs: str, tmp_path: Path) -> None:
    config = RunnerConfig(max_num_requests=8, max_num_tokens=300, max_model_len=512, num_blocks=300, graphs=graphs)  # type: ignore[arg-type]
    with use_store(root=tmp_path, bases=()):
        engine, _, _ = build_engine(random_model("smollm2-135m", dtype=torch.bfloat16, device="cuda"), config)
        before = loaded()
        sampling: tuple[dict[str, Any], ...] = (
            {},
            {"temperature": 0.8},
            {"temperature": 0.8, "top_k": 5},
            {"logprobs": 3},
            {"logprobs": 0},
            {"temperature": 1.0, "min_p": 0.1},
        )
        prompts = [[1 + (length + at) % 1000 for at in range(length)] for length in (1, 2, 15, 16, 17, 40, 64, 65, 130, 256, 299, 400)]
        params = [SamplingParams(max_tokens=6, **sampling[index % len(sampling)]) for index in range(len(prompts))]
        for _ in engine.stream(prompts, params):
            pass
        assert loaded() == before


@pytest.mark.parametrize("native", [False, True], ids=["without the device", "with it"])
def test_a_store_that_was_precompiled_serves(native: bool, tmp_path: Path) -> None:
    env = {**os.environ, "RUNG_CACHE_DIR": str(tmp_path), "RUNG_CACHE_BASE": ""}
    target = "native" if native else "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    built = _run(env, "precompile", "smollm2-135m", "--target", target, "--requests", "8", "--jobs", "8")
    assert built["results"][0]["kernels"] > 40
    _run(env, "bench", "smollm2-135m", "--require-hit", "--sizes", "1,2,8", "--modes", "compiled,piecewise,full", "--repeats", "2")


def _run(env: dict[str, str], *words: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "rung.cli", *words, "--json"], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_cold_start_builds_its_kernels_at_once(tmp_path: Path) -> None:
    code = "from tests.gpu.test_rehearsal import start; start()"
    env = {**os.environ, "RUNG_CACHE_DIR": str(tmp_path / "store"), "RUNG_CACHE_BASE": "", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    found = []
    for _ in ("cold", "warm"):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = found
    assert cold["reason"] == ""
    assert cold["compiled"] + cold["found"] > 40
    assert cold["in_workers"] == cold["compiled"]
    assert cold["one_by_one"] == 0
    assert warm == {"one_by_one": 0}


def start() -> None:
    """Start an engine; print where its images came from, and how many were compiled at their first launch."""
    from rung.launch.triton_images import TritonImages

    late: list[str] = []
    compile_one = TritonImages._compile

    def counted(self: TritonImages, *arguments: Any) -> Any:
        late.append(self.title)
        return compile_one(self, *arguments)

    TritonImages._compile = counted  # type: ignore[method-assign]
    config = RunnerConfig(max_num_requests=8, max_num_tokens=300, max_model_len=512, num_blocks=300, graphs="full_and_piecewise")
    engine, _, began = build_engine(random_model("smollm2-135m", dtype=torch.bfloat16, device="cuda"), config)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    print(json.dumps({"one_by_one": len(late)} | ({} if began.kernels is None else asdict(began.kernels))))
