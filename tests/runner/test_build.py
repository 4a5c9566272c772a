from __future__ import annotations

import pytest

from rung.models import random_model
from rung.runner import RunnerConfig, build_runner


def test_start_up_says_how_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.runner.build.launch_road", lambda: "triton: for a reason")
    _, start = build_runner(random_model("tiny", seed=3), RunnerConfig(eager=True, graphs="none", max_model_len=64))
    assert start.kernel_launches == "triton: for a reason"
