"""The shape of a Llama-family decoder, read from a transformers `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.errors import ConfigError, ModelLoadError, UnknownModelError
from rung.models.rope import FactorScaling, RopeScaling, parse_scaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")
_BY_MODEL_TYPE = dict(zip(("llama", "mistral", "qwen2", "qwen3", "gemma3_text"), ARCHITECTURES, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Everything that decides the module's parameters and arithmetic. Raises `ConfigError` when values contradict each other."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    architecture: str = "LlamaForCausalLM"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm over each head of query and key, before the rotation
    layer_windows: tuple[int | None, ...] = ()  # sliding window of each layer; empty: full attention everywhere

    def __post_init__(self) -> None:
        positive = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_size")
        for name in (*positive, "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}", hint=f"correct {name} in the model's configuration")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}",
                hint="correct num_attention_heads or num_key_value_heads",
            )
        if self.head_size % 2:
            raise ConfigError(f"head_size must be even for rotary embedding, got {self.head_size}", hint="correct head_dim")
        if not self.rms_norm_eps > 0 or not self.rope_theta > 0:
            raise ConfigError(
                f"rms_norm_eps and rope_theta must be positive, got {self.rms_norm_eps} and {self.rope_theta}",
                hint="correct rms_norm_eps or rope_theta",
            )
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ConfigError(
                f"layer_windows must have one entry a layer ({self.num_layers}), got {len(self.layer_windows)}",
                hint="correct layer_types in the model's configuration",
            )
        if isinstance(self.rope_scaling, FactorScaling) and len(self.rope_scaling.factors) != self.head_size // 2:
            raise ConfigError(
                f"rope factors must be {self.head_size // 2} values, got {len(self.rope_scaling.factors)}", hint="the file is damaged"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, None for full attention."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def attention_scale(self) -> float:
        return float(self.head_size**-0.5)

    @classmethod
    def from_transformers(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """From the content of a transformers `config.json` (versions 4 and 5). Raises `UnknownModelError`, `ConfigError`."""
        architecture = architecture_of(values)
        activation = values.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ConfigError(f"hidden_act must be 'silu', got {activation!r}", hint="only gated SiLU models are supported")
        num_heads = need(values, "num_attention_heads")
        theta, scaling = _rope(values)
        bias = bool(values.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=need(values, "vocab_size"),
            hidden_size=need(values, "hidden_size"),
            intermediate_size=need(values, "intermediate_size"),
            num_layers=need(values, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=values.get("num_key_value_heads") or num_heads,
            head_size=values.get("head_dim") or need(values, "hidden_size") // max(num_heads, 1),
            max_position_embeddings=need(values, "max_position_embeddings"),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=bool(values.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            layer_windows=_windows(values, architecture),
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelLoadError`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ModelLoadError(f"cannot read {path}: {problem}", hint="download the file again") from problem
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got a {type(values).__name__}", hint="download the file again")
    return values


def architecture_of(values: Mapping[str, Any]) -> str:
    """The first known architecture that is named. Raises `UnknownModelError`."""
    named = values.get("architectures") or [_BY_MODEL_TYPE.get(str(values.get("model_type")), str(values.get("model_type")))]
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    raise UnknownModelError(
        f"architecture {', '.join(map(str, named))} is not known; known are {', '.join(ARCHITECTURES)}",
        hint="use a model of one of these architectures, or wrap the module itself with rung.wrap",
    )


def need(values: Mapping[str, Any], name: str) -> int:
    """An integer that must be there. Raises `ConfigError`."""
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"the model's configuration must give {name} as an integer, got {value!r}", hint=f"add {name} to config.json")
    return value


def _rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Version 5 keeps theta inside `rope_parameters`; version 4 has `rope_theta` beside an optional `rope_scaling`."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"rope_parameters must be an object, got {parameters!r}", hint="correct config.json")
    if float(parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ConfigError("a partial rotary embedding is not supported", hint="use a model with partial_rotary_factor 1")
    return float(parameters.get("rope_theta", values.get("rope_theta", 10000.0))), parse_scaling(parameters)


def _windows(values: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    window = values.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return ()
    count = need(values, "num_hidden_layers")
    if architecture == "MistralForCausalLM":
        return (int(window),) * count
    if not values.get("use_sliding_window", False):
        return ()
    kinds = values.get("layer_types")
    if kinds is None:  # the rule of transformers before it wrote layer_types
        first = int(values.get("max_window_layers", 0))
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(count)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
