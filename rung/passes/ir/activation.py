"""Gated activations: the activation of the first half of the last dimension, times the second half (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rung.passes.ir.op import define_ir_op


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def silu_body(x: torch.Tensor) -> torch.Tensor:
    return silu_mul(*x.chunk(2, dim=-1))


def gelu_body(x: torch.Tensor) -> torch.Tensor:
    return gelu_mul(*x.chunk(2, dim=-1))


SILU_AND_MUL = define_ir_op("silu_and_mul(Tensor x) -> Tensor", silu_body)
GELU_AND_MUL = define_ir_op("gelu_and_mul(Tensor x) -> Tensor", gelu_body)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 * n] -> [..., n]."""
    result: torch.Tensor = torch.ops.rung.silu_and_mul(x)
    return result


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 * n] -> [..., n], with the tanh approximation of gelu."""
    result: torch.Tensor = torch.ops.rung.gelu_and_mul(x)
    return result
