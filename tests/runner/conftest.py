from __future__ import annotations

import pytest
import torch

from rung.attention.backends.triton_paged import why_no_triton
from rung.runner.ops import StepOps, TorchStepOps, TritonStepOps


@pytest.fixture
def triton_ops() -> StepOps:
    """Skips outside Triton's interpreter; `test_step_ops_interpreted` starts what uses it there."""
    if why_no_triton(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter (TRITON_INTERPRET=1)")
    return TritonStepOps()


@pytest.fixture(params=["torch", "triton"])
def step_ops(request: pytest.FixtureRequest) -> StepOps:
    """Both implementations of the step operations."""
    return TorchStepOps() if request.param == "torch" else request.getfixturevalue("triton_ops")
