"""A parallel MLP on two devices: each rank equals the whole model, compiled and with graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compile.test_distributed import check_ranks, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")]


def test_two_ranks_equal_the_whole_model(tmp_path: Path) -> None:
    """Both modes in one pair of processes, which import, make contexts, meet and compile once."""
    try:
        check_ranks(run_ranks(2, tmp_path, "cuda", ["none", "piecewise"], limit=100))
    finally:
        print(*(log.read_text() for log in sorted(tmp_path.glob("rank*.log"))), sep="\n")
