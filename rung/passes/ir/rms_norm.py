"""Root-mean-square normalisation (Zhang and Sennrich, 2019), as the Llama family uses it: statistics in fp32, the weight last."""

from __future__ import annotations

import torch

from rung.passes.ir.op import define_ir_op


def rms_norm_body(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype)


def _shapes(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """A trace meets two norms a layer, and the nine operations of the body were a seventh of its time (8B shape, torch 2.11)."""
    plain = weight.dim() == 1 and x.dim() > 0 and type(weight.shape[0]) is type(x.shape[-1]) is int
    if not plain or weight.shape[0] != x.shape[-1]:
        return rms_norm_body(x, weight, epsilon)
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))


RMS_NORM = define_ir_op("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor", rms_norm_body, shapes=_shapes)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., hidden], weight [hidden] -> [..., hidden] in x's dtype (or the wider of both)."""
    result: torch.Tensor = torch.ops.rung.rms_norm(x, weight, epsilon)
    return result
