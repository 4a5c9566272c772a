"""Device work around the forward pass: one contract, one file for each implementation."""

from rung.runner.ops.base import StepOps
from rung.runner.ops.torch_ops import TorchStepOps

__all__ = ["StepOps", "TorchStepOps"]
