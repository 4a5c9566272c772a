"""From a configuration to a module without values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    _give_memory(module, torch.device(device))
    for part in module.modules():
        if isinstance(part, RotaryEmbedding):
            part.fill()
    return module.requires_grad_(False).eval()


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """As `Module.to_empty`, whose `empty_like` of a tensor without memory imports a second of symbolic shapes."""
    made: dict[int, Any] = {}  # tied parameters stay tied
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    new = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
                    made[id(tensor)] = (tensor, new)  # the old one lives on, so that no other gets its id
                table[name] = made[id(tensor)][1]
