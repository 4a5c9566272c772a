"""From a configuration to a module without values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rung.models import gemma3
from rung.models.config import LlamaConfig, architecture_of, read_json
from rung.models.gemma3 import Gemma3Config, Gemma3ForCausalLM
from rung.models.llama import LlamaForCausalLM
from rung.models.rope import RotaryEmbedding


def config_from_transformers(values: Mapping[str, Any]) -> LlamaConfig:
    """The configuration that the architecture in a `config.json` takes. Raises `UnknownModelError`, `ConfigError`."""
    kind = Gemma3Config if architecture_of(values) == gemma3.ARCHITECTURE else LlamaConfig
    return kind.from_transformers(values)


def read_config(path: Path) -> LlamaConfig:
    """Read a `config.json`. Raises `ModelLoadError` when it is not JSON, otherwise as `config_from_transformers`."""
    return config_from_transformers(read_json(path))


def empty_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> LlamaForCausalLM:
    """The module with uninitialised parameters on `device` and the rotary tables filled; nothing is initialised twice."""
    with torch.device("meta"):
        module = Gemma3ForCausalLM(config, dtype) if isinstance(config, Gemma3Config) else LlamaForCausalLM(config, dtype)
    module.to_empty(device=device)
    for part in module.modules():
        if isinstance(part, RotaryEmbedding):
            part.fill()
    return module.requires_grad_(False).eval()
