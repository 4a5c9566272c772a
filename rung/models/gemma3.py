"""Gemma-3 (text) over a flat batch: sliding and full attention in turn, a rotary base each, norms around both halves of a layer.

Source of the arithmetic: "Gemma 3 Technical Report", arXiv 2503.19786, and transformers' `modeling_gemma3.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from rung.errors import ConfigError
from rung.models.config import LlamaConfig, need
from rung.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, RMSNorm
from rung.models.rope import RopeScaling, RotaryEmbedding, parse_scaling

ARCHITECTURE = "Gemma3ForCausalLM"
_PATTERN = 6  # every sixth layer has full attention
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(LlamaConfig):
    """`rope_theta` and `rope_scaling` hold for layers without a window, `local_rope_theta` for those with one."""

    local_rope_theta: float = _LOCAL_THETA
    query_pre_attn_scalar: float = 256.0

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.query_pre_attn_scalar)

    @classmethod
    def from_transformers(cls, values: Mapping[str, Any]) -> Gemma3Config:
        """From the content of a `config.json` of a text model. Raises `ConfigError`."""
        activation = values.get("hidden_activation", values.get("hidden_act", "gelu_pytorch_tanh"))
        if activation != "gelu_pytorch_tanh":
            raise ConfigError(f"hidden_activation must be 'gelu_pytorch_tanh', got {activation!r}", hint="use a published Gemma-3 model")
        for name in ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if values.get(name):
                raise ConfigError(f"{name}={values[name]!r} is not supported", hint="use a published Gemma-3 model")
        count, theta, local_theta, scaling = need(values, "num_hidden_layers"), *_ropes(values)
        return cls(
            architecture=ARCHITECTURE,
            vocab_size=need(values, "vocab_size"),
            hidden_size=need(values, "hidden_size"),
            intermediate_size=need(values, "intermediate_size"),
            num_layers=count,
            num_heads=need(values, "num_attention_heads"),
            num_kv_heads=need(values, "num_key_value_heads"),
            head_size=need(values, "head_dim"),
            max_position_embeddings=need(values, "max_position_embeddings"),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            local_rope_theta=local_theta,
            query_pre_attn_scalar=float(values.get("query_pre_attn_scalar", 256)),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", True)),
            qk_norm=True,
            layer_windows=_windows(values, count),
        )


def _ropes(values: Mapping[str, Any]) -> tuple[float, float, RopeScaling | None]:
    """Version 5 of transformers keeps one entry for each kind of layer in `rope_parameters`; version 4 has flat fields."""
    parameters = values.get("rope_parameters") or {}
    if "full_attention" in parameters:
        full, local = parameters["full_attention"], parameters.get("sliding_attention", {})
        return float(full.get("rope_theta", _THETA)), float(local.get("rope_theta", _LOCAL_THETA)), parse_scaling(full)
    scaling = parse_scaling(values.get("rope_scaling") or {})
    return float(values.get("rope_theta", _THETA)), float(values.get("rope_local_base_freq", _LOCAL_THETA)), scaling


def _windows(values: Mapping[str, Any], count: int) -> tuple[int | None, ...]:
    window, pattern = need(values, "sliding_window"), int(values.get("sliding_window_pattern", _PATTERN))
    kinds = values.get("layer_types") or ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(count)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Gemma3RMSNorm(RMSNorm):
    """The factor is 1 + weight, and is applied before the result is rounded to the model's dtype."""

    offset: ClassVar[float] = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = torch.ops.rung.rms_norm(x.float(), self.offset + self.weight.float(), self.epsilon)
        return normed.to(x.dtype)


class Gemma3MLP(LlamaMLP):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(torch.ops.rung.gelu_and_mul(self.gate_up_proj(hidden)))
        return projected


class Gemma3Layer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.slides = config.window(layer) is not None
        self.input_norm = Gemma3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = LlamaAttention(config, layer, Gemma3RMSNorm)
        self.post_attention_norm = Gemma3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_mlp_norm = Gemma3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Gemma3MLP(config)
        self.post_mlp_norm = Gemma3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same."""
        hidden = hidden + self.post_attention_norm(self.attention(self.input_norm(hidden), cos, sin))
        result: torch.Tensor = hidden + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(hidden)))
        return result


class Gemma3ForCausalLM(LlamaForCausalLM):
    """As `LlamaForCausalLM`, for a `Gemma3Config`."""

    layer_type: ClassVar[type[nn.Module]] = Gemma3Layer
    norm_type: ClassVar[type[RMSNorm]] = Gemma3RMSNorm

    def __init__(self, config: Gemma3Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, dtype)
        self.local_rotary = RotaryEmbedding(config.head_size, config.max_position_embeddings, config.local_rope_theta, None, dtype)
        # Rounded to the model's dtype, as the published models were trained.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        local, whole = self.local_rotary(positions), self.rotary(positions)
        hidden = self.embed_tokens(input_ids) * self.embedding_scale
        for layer in self.layers:
            hidden = layer(hidden, *(local if layer.slides else whole))
        normed: torch.Tensor = self.norm(hidden)
        return normed
