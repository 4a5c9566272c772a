"""Small batches on which passes over a whole graph prove themselves."""

from __future__ import annotations

import torch

from rung.attention import Attention, AttentionMetadata
from rung.context import ForwardContext


def context(layer: Attention) -> ForwardContext:
    """A step of two requests, of three tokens and of two, without a past; blocks of 16."""
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32),
        seq_lens=torch.tensor([3, 2], dtype=torch.int32),
        block_table=torch.tensor([[0], [1]], dtype=torch.int32),
        slot_mapping=torch.tensor([0, 1, 2, 16, 17]),
        num_requests=2,
        num_actual_tokens=5,
        max_query_len=3,
        max_seq_len=3,
    )
    return ForwardContext(attention_layers={layer.name: layer}, attention_metadata={layer.name: metadata}, num_actual_tokens=5)


def rotated_as_transformers(
    query: torch.Tensor,  # [num_tokens, heads, head_size]
    key: torch.Tensor,
    angles: torch.Tensor,  # [num_tokens, head_size / 2]
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    twice = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    half = angles.shape[-1]

    def one(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))
        return x * twice.cos() + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * twice.sin()

    return one(query, weights[0]), one(key, weights[1])
