"""Rotary position embedding: frequencies, their scalings, the cos/sin table. The rotation itself belongs to attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rung.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)  # full turns within the original context
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * keep + frequencies / self.factor * (1 - keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorScaling:
    """Each frequency has its own divisor; GGUF files store Llama 3.1's scaling in this form (`rope_freqs.weight`)."""

    factors: tuple[float, ...]  # head_size / 2 values

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / torch.tensor(self.factors, dtype=frequencies.dtype)


RopeScaling = LinearScaling | Llama3Scaling | FactorScaling


def parse_scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    """A `rope_scaling` or `rope_parameters` entry of a transformers config. Raises `ConfigError` for a kind that is not supported."""
    kind = values.get("rope_type", values.get("type", "default"))
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return LinearScaling(factor=float(values["factor"]))
        if kind == "llama3":
            return Llama3Scaling(
                factor=float(values["factor"]),
                low_freq_factor=float(values["low_freq_factor"]),
                high_freq_factor=float(values["high_freq_factor"]),
                original_max_position_embeddings=int(values["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ConfigError(
            f"rope scaling {kind!r} needs {missing}, got {sorted(values)}", hint="complete the entry in config.json"
        ) from None
    raise ConfigError(f"rope scaling {kind!r} is not supported", hint="supported are 'default', 'linear' and 'llama3'")


def inverse_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """fp32 [head_size / 2] on the CPU: theta^(-2i / head_size), scaled. Source: RoFormer, arXiv 2104.09864."""
    with torch.device("cpu"):
        frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size))
        return frequencies if scaling is None else scaling.apply(frequencies)


class RotaryEmbedding(nn.Module):
    """A table of cos and sin for every position, computed in fp32 and stored in the model's dtype as transformers rounds it."""

    table: torch.Tensor  # [max_positions, head_size]: cos of the head_size / 2 angles, then sin

    def __init__(self, head_size: int, max_positions: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size = head_size
        self.theta = theta
        self.scaling = scaling
        self.register_buffer("table", torch.empty(max_positions, head_size, dtype=dtype), persistent=False)

    @torch.no_grad()
    def fill(self) -> None:
        """Compute the table; needed once after the module got its storage."""
        frequencies = inverse_frequencies(self.head_size, self.theta, self.scaling).to(self.table.device)
        positions = torch.arange(self.table.shape[0], dtype=torch.float32, device=self.table.device)
        angles = torch.outer(positions, frequencies)
        self.table.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] -> cos, sin, each [num_tokens, 1, head_size / 2]."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin
