from __future__ import annotations

import gc

import pytest

from rung.models import random_model
from rung.runner import RunnerConfig, build_engine, build_runner


def test_start_up_says_how_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.runner.build.launch_road", lambda: "triton: for a reason")
    _, start = build_runner(random_model("tiny", seed=3), RunnerConfig(eager=True, graphs="none", max_model_len=64))
    assert start.kernel_launches == "triton: for a reason"


def test_a_frozen_heap_leaves_collections_little_to_walk() -> None:
    config = RunnerConfig(max_num_requests=2, max_num_tokens=16, max_model_len=16, num_blocks=4, eager=True, freeze_heap=True)
    gc.unfreeze()
    try:
        build_engine(random_model("tiny"), config)
        assert gc.get_freeze_count() > 10 * len(gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_model_on_a_cpu_asks_for_no_kernels_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch is a CUDA build, without a driver."""

    def refused(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr("rung.runner.build.launch_road", lambda: "prebound")
    monkeypatch.setattr("rung.runner.build.build_kernels", refused)
    _, start = build_runner(random_model("tiny"), RunnerConfig(max_num_requests=2, max_num_tokens=16, max_model_len=32, num_blocks=8))
    assert start.compile is not None
    assert start.compile.source == "compiled"
