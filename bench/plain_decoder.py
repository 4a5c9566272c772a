"""A decoder in plain torch, its projections apart and its rows [1, tokens, hidden], as unmodified models are: all fusions find work."""

from __future__ import annotations

import torch
from torch import nn

from rung.attention import Attention, AttentionSpec
from rung.models.config import LlamaConfig


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, number: int) -> None:
        super().__init__()
        hidden, inner, self.head_size = config.hidden_size, config.intermediate_size, config.head_size
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.input_norm, self.middle_norm = Norm(hidden), Norm(hidden)
        self.q_proj = nn.Linear(hidden, config.query_size, bias=False)
        self.k_proj = nn.Linear(hidden, config.kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.query_size, hidden, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.q_norm = Norm(config.head_size) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(config.head_size) if config.qk_norm else nn.Identity()
        spec = AttentionSpec(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_size=config.head_size, scale=config.head_size**-0.5
        )
        self.attention = Attention(f"layers.{number}.attention", spec)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.input_norm(x)
        query = self.q_norm(self.q_proj(normed).unflatten(-1, (self.heads, self.head_size))).transpose(1, 2)
        key = self.k_norm(self.k_proj(normed).unflatten(-1, (self.kv_heads, self.head_size))).transpose(1, 2)
        value = self.v_proj(normed).unflatten(-1, (self.kv_heads, self.head_size)).transpose(1, 2)
        cosines, sines = cos.unsqueeze(1), sin.unsqueeze(1)
        query = (query * cosines) + (turned(query) * sines)
        key = (key * cosines) + (turned(key) * sines)
        rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        attended = self.attention(*rows).unsqueeze(0).flatten(-2)
        x = x + self.o_proj(attended)
        normed = self.middle_norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class PlainDecoder(nn.Module):
    """forward(input_ids [num_tokens], positions [num_tokens]) -> hidden [num_tokens, hidden_size]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.norm = Norm(config.hidden_size)
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, config.head_size, 2).float() / config.head_size))
        self.register_buffer("frequencies", frequencies)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids).unsqueeze(0)
        angles = positions.float()[None, :, None] * self.frequencies.float()
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos().to(x.dtype), both.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: torch.Tensor = self.norm(x).squeeze(0)
        return normed
