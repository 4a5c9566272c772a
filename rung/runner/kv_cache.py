"""The paged KV cache: how many blocks fit, and the storage."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from rung.attention import Attention, KVCache
from rung.errors import KVCacheTooSmallError
from rung.runner.config import RunnerConfig
from rung.runner.memory_plan import MemoryPlan


def block_bytes(layers: Iterable[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return sum(2 * block_size * layer.spec.num_kv_heads * layer.spec.head_size * dtype.itemsize for layer in layers)


def most_kv_blocks(config: RunnerConfig) -> int:
    """Blocks of every slot at its full length, and the null block. More would never be used."""
    return config.max_num_requests * config.max_blocks_per_request + 1


def num_kv_blocks(config: RunnerConfig, bytes_per_block: int, device: torch.device, plan: MemoryPlan | None = None) -> int:
    """Blocks that the configured budget holds. `plan` tells what the memory fraction leaves; without one that is taken of what is free now.
    Raises `KVCacheTooSmallError` when a request of `max_model_len` would not fit."""
    if config.num_blocks is not None:
        num_blocks, source = config.num_blocks, f"num_blocks={config.num_blocks}"
    elif config.kv_cache_bytes is not None:
        num_blocks, source = config.kv_cache_bytes // bytes_per_block, f"kv_cache_bytes={config.kv_cache_bytes}"
    else:
        budget = int(free_bytes(device) * config.memory_fraction) if plan is None else plan.kv_budget_bytes
        num_blocks = min(max(budget, 0) // bytes_per_block, most_kv_blocks(config))
        source = f"memory_fraction={config.memory_fraction}: {plan or f'{budget} bytes of the free memory'}"
    needed = config.max_blocks_per_request + 1
    if num_blocks < needed:
        fits = max(num_blocks - 1, 0) * config.block_size
        raise KVCacheTooSmallError(
            f"{source} gives {num_blocks} KV-cache blocks of {config.block_size} tokens ({bytes_per_block} bytes each, all layers); one "
            f"request of max_model_len={config.max_model_len} needs {needed}, the null block included ({needed * bytes_per_block} bytes)",
            hint=f"lower max_model_len to at most {fits}, or raise the budget" if fits >= 2 else "raise the KV-cache budget",
        )
    return num_blocks


def allocate_kv_caches(
    layers: dict[str, Attention], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, KVCache]:
    """Zeroed storage for each layer; the caller owns it, and its address must not change while a graph lives."""

    def storage(layer: Attention) -> torch.Tensor:
        shape = (num_blocks, block_size, layer.spec.num_kv_heads, layer.spec.head_size)
        return torch.zeros(shape, dtype=dtype, device=device)

    return {name: KVCache(storage(layer), storage(layer)) for name, layer in layers.items()}


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
