"""Models of a named shape with random weights, for benchmarks and tests."""

from __future__ import annotations

import torch

from rung.errors import UnknownModelError
from rung.models.build import empty_model
from rung.models.config import LlamaConfig
from rung.models.llama import LlamaForCausalLM

SHAPES: dict[str, LlamaConfig] = {
    "llama-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "tiny": LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
}


@torch.no_grad()
def random_model(
    config: LlamaConfig | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> LlamaForCausalLM:
    """Norm weights 1, everything else normal with deviation 0.02. Equal for equal seed, dtype and kind of device.

    `config` may be a name from `SHAPES`; raises `UnknownModelError` for another name."""
    if isinstance(config, str):
        config = _shape(config)
    module = empty_model(config, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    return module


def _shape(name: str) -> LlamaConfig:
    if name not in SHAPES:
        raise UnknownModelError(f"no model shape is named {name!r}", hint=f"use one of {', '.join(SHAPES)}, or a LlamaConfig")
    return SHAPES[name]
