"""A Llama-family decoder over a flat batch: Llama, Mistral, Qwen2, Qwen3, SmolLM.

All requests of a step lie behind one another in one token dimension; only attention knows where one ends. Query, key and value share
one projection, gate and up another; the residual travels beside the hidden state so that each add stands next to the norm after it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from rung.attention import Attention, AttentionSpec, Rotation
from rung.models.config import LlamaConfig
from rung.models.fp8 import FP8Linear
from rung.models.rope import RotaryEmbedding
from rung.passes import ir as _ir  # noqa: F401  registers torch.ops.rung.rms_norm and others


class Linear(nn.Linear):
    """Without initial values: they would be overwritten, and drawing them takes seconds even on the meta device."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """Without initial values, as `Linear`."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    offset: ClassVar[float] = 0.0  # added to the weight

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = torch.ops.rung.rms_norm(x, self.weight, self.epsilon)
        return normed


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        self.sizes = (config.query_size, config.kv_size, config.kv_size)
        self.qkv_proj = Linear(config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        self.o_proj = Linear(config.query_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = norm(config.head_size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = norm(config.head_size, config.rms_norm_eps) if config.qk_norm else None
        self.norm_epsilon, self.norm_offset = config.rms_norm_eps, norm.offset
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.attention_scale,
            sliding_window=config.window(layer),
        )
        self.attention = Attention(f"layers.{layer}.attention", spec)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # unflatten with both sizes given, never view(-1, ...): an empty batch leaves -1 undetermined
        query, key, value = self.qkv_proj(hidden).split(self.sizes, dim=-1)
        query = query.unflatten(-1, (self.num_heads, self.head_size))  # [num_tokens, num_heads, head_size]
        key = key.unflatten(-1, (self.num_kv_heads, self.head_size))  # [num_tokens, num_kv_heads, head_size]
        value = value.unflatten(-1, (self.num_kv_heads, self.head_size))  # a strided view of the projection
        attended = self.attention(query, key, value, self._rotation(cos, sin))
        projected: torch.Tensor = self.o_proj(attended.flatten(-2))
        return projected

    def _rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        if self.q_norm is None or self.k_norm is None:
            return Rotation(cos=cos, sin=sin)
        return Rotation(
            cos=cos,
            sin=sin,
            query_weight=self.q_norm.weight,
            key_weight=self.k_norm.weight,
            epsilon=self.norm_epsilon,
            offset=self.norm_offset,
        )


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(torch.ops.rung.silu_and_mul(self.gate_up_proj(hidden)))
        return projected


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = LlamaAttention(config, layer)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All [num_tokens, hidden_size]; returns this layer's output, not yet added, and the residual it belongs to."""
        residual = hidden if residual is None else hidden + residual
        residual = self.attention(self.input_norm(residual), cos, sin) + residual
        return self.mlp(self.post_attention_norm(residual)), residual


class LlamaForCausalLM(nn.Module):
    """forward(input_ids [num_tokens], positions [num_tokens]) -> hidden [num_tokens, hidden_size], normed.

    Attention runs in the current forward context; bind a KV cache and a backend to every layer first. Built with storage but without
    values: use `load_model` or `random_model`."""

    layer_type: ClassVar[type[nn.Module]] = LlamaLayer
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: LlamaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_type(config, layer) for layer in range(config.num_layers))
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps)
        self.lm_head: Linear | FP8Linear | None = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.to(dtype)
        self.rotary = RotaryEmbedding(config.head_size, config.max_position_embeddings, config.rope_theta, config.rope_scaling, dtype)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(positions)
        hidden = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin)
        normed: torch.Tensor = self.norm(hidden if residual is None else hidden + residual)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size], in the model's dtype."""
        if isinstance(self.lm_head, FP8Linear):
            quantised: torch.Tensor = self.lm_head(hidden)
            return quantised
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits: torch.Tensor = torch.ops.rung.linear(hidden, head.weight, None, "")
        return logits
