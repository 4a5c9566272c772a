"""Device work around the forward pass: one contract, one file for each implementation."""

from __future__ import annotations

import torch

from rung.attention.backends.triton_paged import why_no_triton
from rung.runner.ops.base import StepOps
from rung.runner.ops.torch_ops import TorchStepOps
from rung.runner.ops.triton_ops import TritonStepOps

__all__ = ["StepOps", "TorchStepOps", "TritonStepOps", "default_ops"]


def default_ops(device: torch.device, *, batch_invariant: bool = False) -> tuple[StepOps, str]:
    """The operations for `device` and why they were chosen: Triton on CUDA when it is installed, else torch."""
    reason = why_no_triton(device) if device.type == "cuda" else "the step's Triton kernels are for CUDA devices"
    ops: StepOps = TritonStepOps(batch_invariant=batch_invariant) if reason is None else TorchStepOps()
    return ops, ops.name if reason is None else f"{ops.name}: {reason}"
