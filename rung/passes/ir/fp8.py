"""Quantisation to e4m3: values as `float8_e4m3fn`, and the float32 scales that they are to be multiplied by.

e4m3 (Micikevicius et al., arXiv 2209.05433) has 3 mantissa bits, numbers up to 448 and no infinity, so values are clamped before they are
rounded. A row or group of zeros has a tiny scale, not 0.
"""

from __future__ import annotations

import torch

from rung.passes.ir.op import define_ir_op

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
GROUP = 128  # elements of a row with one scale, where scales are by group
TINY = 1e-12  # the largest magnitude that a row or group is taken to have at least


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def quant_static_body(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _rounded(x.float() / scale)


def quant_per_token_body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST
    return _rounded(wide / scale), scale


def quant_group_body(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float().unflatten(-1, (-1, group))
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST
    return _rounded(wide / scale).flatten(-2), scale.squeeze(-1)


def quant_rows_body(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """By one given scale, or per token; either way with a scale for each row, of its own memory."""
    if scale is None:
        return quant_per_token_body(x)
    return quant_static_body(x, scale), scale.expand(x.shape[0], 1).clone(memory_format=torch.contiguous_format)


FP8_QUANT_STATIC = define_ir_op("fp8_quant_static(Tensor x, Tensor scale) -> Tensor", quant_static_body)
FP8_QUANT_PER_TOKEN = define_ir_op("fp8_quant_per_token(Tensor x) -> (Tensor, Tensor)", quant_per_token_body)
FP8_QUANT_GROUP = define_ir_op("fp8_quant_group(Tensor x, int group) -> (Tensor, Tensor)", quant_group_body)


def fp8_quant_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., k], scale [1] float32 -> x / scale as e4m3 [..., k]; what lies beyond 448 * scale becomes that."""
    result: torch.Tensor = torch.ops.rung.fp8_quant_static(x, scale)
    return result


def fp8_quant_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., k] -> e4m3 [..., k], scales [..., 1]: the largest magnitude of a row becomes 448."""
    values, scales = torch.ops.rung.fp8_quant_per_token(x)
    return values, scales


def fp8_quant_group(x: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., k], k a multiple of `group` -> e4m3 [..., k], scales [..., k / group]: as per token, for each group of a row."""
    values, scales = torch.ops.rung.fp8_quant_group(x, group)
    return values, scales
