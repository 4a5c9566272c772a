"""The promises of conftest.py that other tests build on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]

_PROJECT = """
import pytest
from rung.context import ForwardContext, _current

def test_leaves_a_context():
    _current.set(ForwardContext())

@pytest.mark.gpu
def test_needs_a_device():
    import torch
    assert torch.zeros(1, device="cuda").is_cuda
"""


def test_store_is_a_folder_of_the_test(rung_cache_dir: Path, tmp_path: Path) -> None:
    assert os.environ["RUNG_CACHE_DIR"] == str(rung_cache_dir)
    assert rung_cache_dir.is_relative_to(tmp_path)
    assert not rung_cache_dir.exists()


def test_inductor_directory_is_the_shared_one(inductor_dir: Path) -> None:
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(inductor_dir)


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_draws_the_same_numbers(turn: int) -> None:
    assert torch.randint(1000, (3,)).tolist() == [44, 239, 933]


def test_thread_count_is_the_declared_one() -> None:
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_a_context_left_behind_and_a_missing_device_are_noticed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = gpu: needs a CUDA device")
    pytester.makepyfile(_PROJECT)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1 + torch.cuda.is_available(), errors=1, skipped=1 - torch.cuda.is_available())
    result.stdout.fnmatch_lines(["*the test left a forward context set*"])
