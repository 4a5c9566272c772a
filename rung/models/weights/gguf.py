"""Weights and configuration out of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rung.errors import ConfigError, UnknownModelError
from rung.models.build import config_from_transformers
from rung.models.config import LlamaConfig
from rung.models.gemma3 import Gemma3Config
from rung.models.rope import FactorScaling
from rung.models.weights.base import WeightSource
from rung.models.weights.gguf_file import GGUFFile

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA3_LAYER = {
    **_IN_LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource(WeightSource):
    """Dequantises to fp32; `config` and `metadata` come from the same file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.metadata: dict[str, Any] = self._file.metadata
        self.config = _config(self._file)
        in_layer = _IN_GEMMA3_LAYER if isinstance(self.config, Gemma3Config) else _IN_LAYER
        self._stored = {_transformers_name(name, in_layer): name for name in self._file.tensors if name != _ROPE_FACTORS}

    def names(self) -> Iterator[str]:
        yield from sorted(self._stored, key=lambda name: self._file.tensors[self._stored[name]].offset)

    def read(self, name: str) -> torch.Tensor:
        values = torch.from_numpy(np.require(self._file.blocks(self._file.tensors[self._stored[name]]), requirements=["C", "W"]))
        if self.config.architecture == "LlamaForCausalLM":
            if ".self_attn.q_proj." in name:
                return unpermute(values, self.config.num_heads)
            if ".self_attn.k_proj." in name:
                return unpermute(values, self.config.num_kv_heads)
        if isinstance(self.config, Gemma3Config) and name.endswith("norm.weight"):
            return values - 1.0  # the file holds the whole factor, a checkpoint what is added to 1
        return values

    def place(self, name: str | None = None) -> str:
        return str(self._file.path)


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order of llama files: there the rotation pairs neighbours (2i, 2i + 1) of a head, here i and i + head_size / 2."""
    half = rows.shape[0] // heads // 2
    paired = rows.reshape(heads, half, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def _transformers_name(name: str, in_layer: Mapping[str, str]) -> str:
    """Our source's name of a stored tensor; a name that is not known stays, so that the loader reports it."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in in_layer:
        return f"model.layers.{parts[1]}.{in_layer[parts[2]]}.{kind}"
    return name


def _config(file: GGUFFile) -> LlamaConfig:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnknownModelError(
            f"{file.path} has the architecture {architecture!r}; known are {', '.join(_ARCHITECTURES)}",
            hint="use a GGUF file of one of these architectures",
        )
    heads, hidden = metadata.get(f"{architecture}.attention.head_count"), metadata.get(f"{architecture}.embedding_length")
    rotated = metadata.get(f"{architecture}.rope.dimension_count")
    head_size = metadata.get(f"{architecture}.attention.key_length") or rotated or None
    if rotated and head_size != rotated:
        raise ConfigError(f"a rotary embedding of {rotated} of {head_size} elements is not supported", hint="use another model")
    embedding = file.tensors.get("token_embd.weight")
    config = config_from_transformers(
        {
            "architectures": [_ARCHITECTURES[architecture]],
            "vocab_size": embedding.shape[0] if embedding else metadata.get(f"{architecture}.vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": metadata.get(f"{architecture}.feed_forward_length"),
            "num_hidden_layers": metadata.get(f"{architecture}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv"),
            "head_dim": head_size,
            "max_position_embeddings": metadata.get(f"{architecture}.context_length"),
            "rms_norm_eps": metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6),
            **_rope(metadata, architecture),
            "sliding_window": metadata.get(f"{architecture}.attention.sliding_window") if architecture == "gemma3" else None,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        }
    )
    if _ROPE_FACTORS in file.tensors:
        factors = file.blocks(file.tensors[_ROPE_FACTORS])
        config = replace(config, rope_scaling=FactorScaling(factors=tuple(factors.tolist())))
    return config


def _rope(metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
    scaling = _scaling(metadata, architecture)
    if architecture != "gemma3":
        return {"rope_parameters": {"rope_theta": metadata.get(f"{architecture}.rope.freq_base", 10000.0), **scaling}}
    local = {"rope_theta": metadata.get(f"{architecture}.rope.freq_base_swa", 10000.0)}
    return {
        "rope_parameters": {
            "full_attention": {"rope_theta": metadata.get(f"{architecture}.rope.freq_base", 1e6), **scaling},
            "sliding_attention": local,
        }
    }


def _scaling(metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    return {"rope_type": kind, "factor": metadata.get(f"{architecture}.rope.scaling.factor", 1.0)}
