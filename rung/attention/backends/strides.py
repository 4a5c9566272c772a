"""What the Triton kernels of attention demand of strides."""

from __future__ import annotations

import torch

from rung.attention.base import KVCache
from rung.errors import ConfigError


def rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor`, whose last dimension must be contiguous. Raises `ConfigError`."""
    if tensor.stride(-1) != 1:
        raise ConfigError(f"{name}: the last dimension must be contiguous, strides are {tensor.stride()}", hint="call .contiguous() first")
    return tensor


def cache_strides(cache: KVCache) -> tuple[int, ...]:
    """The strides of both halves of a cache. Raises `ConfigError` where they differ."""
    stride = cache.key.stride()
    if stride != cache.value.stride() or stride[-1] != 1:
        raise ConfigError(
            f"KV cache: keys and values must have equal strides and a contiguous last dimension, not {stride} and {cache.value.stride()}",
            hint="allocate both as one shape, or as the halves of one tensor",
        )
    return stride
