"""The bench of cold compiles: what it runs torch.compile over, and its table."""

from __future__ import annotations

import pytest
import torch

from bench.cold_compile import copying, show
from rung.context import set_forward_context
from rung.models import random_model


def test_a_decoder_runs_with_attention_that_copies() -> None:
    module = random_model("tiny")
    with torch.no_grad(), set_forward_context(copying(module)):
        hidden = module(torch.zeros(5, dtype=torch.int64), torch.arange(5))
    assert hidden.shape == (5, module.config.hidden_size)
    assert hidden.isfinite().all()


def test_the_table_has_a_column_a_process_and_the_sum_last(capsys: pytest.CaptureFixture[str]) -> None:
    show([("rung", {"trace": 1.0, "call to ready": 2.5}), ("torch", {"trace": 2.0, "guards": 0.25, "call to ready": 9.0})])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["seconds", "rung", "torch"],
        ["trace", "1.00", "2.00"],
        ["guards", "-", "0.25"],
        ["call", "to", "ready", "2.50", "9.00"],
    ]
