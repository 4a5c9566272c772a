"""The rotation that an attention layer may apply itself: what it consists of, and its meaning in plain torch.

Element i is paired with element i + rotary / 2 (the "rotate half" form that transformers checkpoints use); elements from `rotary` on pass.
Source: RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Row t of query and key is rotated by row t of `cos` and `sin`; with weights, each head is normalised before (RMS over head_size)."""

    cos: torch.Tensor  # [num_tokens, 1, rotary / 2], rotary <= head_size
    sin: torch.Tensor  # like cos
    query_weight: torch.Tensor | None = None  # [head_size]; both weights or none
    key_weight: torch.Tensor | None = None
    epsilon: float = 0.0
    offset: float = 0.0  # added to the weights: 1.0 for Gemma


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [num_tokens, heads, head_size]; cos and sin are [num_tokens, 1, rotary / 2]."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)


def rotated_query_and_key(query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Both normalised and rotated, computed in float32 at least and rounded once, as a compiled piece rounds them."""
    compute = torch.promote_types(query.dtype, torch.float32)
    cos, sin = rotation.cos.to(compute), rotation.sin.to(compute)

    def one(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        wide = x.to(compute)
        if weight is not None:
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rotation.epsilon)
            wide = (weight.to(compute) + rotation.offset) * normed
        return rotate(wide, cos, sin).to(x.dtype)

    return one(query, rotation.query_weight), one(key, rotation.key_weight)
