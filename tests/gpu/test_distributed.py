"""A parallel MLP on two devices: each rank equals the whole model, compiled and with graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compile.test_distributed import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")]


@pytest.mark.parametrize("graphs", ["none", "piecewise"])
def test_two_ranks_equal_the_whole_model(graphs: str, tmp_path: Path) -> None:
    said = run_ranks(2, tmp_path, "cuda", graphs)
    assert sorted(text.split()[0] for text in said) == ["compiled", "loaded"]
