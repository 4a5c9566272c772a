"""The paged KV cache: how many blocks fit, the storage, and the layers that read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from rung.attention import Attention, AttentionBackend, AttentionSpec, KVCache
from rung.errors import KVCacheTooSmallError, StateError
from rung.runner.config import RunnerConfig
from rung.runner.kv_groups import KVGroup, blocks_in, blocks_per_request, cache_bytes, group_blocks, most_kv_blocks, windows_of
from rung.runner.memory_plan import MemoryPlan


def cache_dtype(config: RunnerConfig, dtype: torch.dtype) -> torch.dtype:
    """The element type of keys and values of a model in `dtype`."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype


def num_kv_blocks(config: RunnerConfig, groups: Sequence[KVGroup], device: torch.device, plan: MemoryPlan | None = None) -> int:
    """Blocks of the group whose requests own most (see `group_blocks`) that the configured budget holds. `plan` tells what the memory
    fraction leaves; without one that is taken of what is free now. Raises `KVCacheTooSmallError` when a request of `max_model_len` would
    not fit."""
    if config.num_blocks is not None:
        num_blocks, source = config.num_blocks, f"num_blocks={config.num_blocks}"
    elif config.kv_cache_bytes is not None:
        num_blocks, source = blocks_in(config, groups, config.kv_cache_bytes), f"kv_cache_bytes={config.kv_cache_bytes}"
    else:
        budget = int(free_bytes(device) * config.memory_fraction) if plan is None else plan.kv_budget_bytes
        num_blocks = min(blocks_in(config, groups, max(budget, 0)), most_kv_blocks(config, groups))
        source = f"memory_fraction={config.memory_fraction}: {plan or f'{budget} bytes of the free memory'}"
    needed = max(blocks_per_request(config, group.window) for group in groups) + 1
    if num_blocks < needed:
        fits = max(num_blocks - 1, 0) * config.block_size
        size = sum(group.block_bytes for group in groups)
        raise KVCacheTooSmallError(
            f"{source} gives {num_blocks} KV-cache blocks of {config.block_size} tokens ({size} bytes each, all layers); one "
            f"request of max_model_len={config.max_model_len} needs {needed}, the null block included "
            f"({cache_bytes(config, groups, needed)} bytes)",
            hint=f"lower max_model_len to at most {fits}, or raise the budget" if fits >= 2 else "raise the KV-cache budget",
        )
    return num_blocks


def allocate_kv_caches(
    layers: Mapping[str, Attention],
    groups: Sequence[KVGroup],
    num_blocks: int,
    config: RunnerConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, KVCache]:
    """Zeroed storage for each layer; the caller owns it, and its address must not change while a graph lives."""

    def storage(layer: Attention, count: int) -> torch.Tensor:
        shape = (count, config.block_size, layer.spec.num_kv_heads, layer.spec.head_size)
        return torch.zeros(shape, dtype=dtype, device=device)

    counts = group_blocks(config, windows_of(groups), num_blocks)
    count_of = {name: count for group, count in zip(groups, counts, strict=True) for name in group.layers}

    def cache(layer: Attention, count: int) -> KVCache:
        scales = (layer.key_scale, layer.value_scale) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
        return KVCache(storage(layer, count), storage(layer, count), *scales)

    return {name: cache(layer, count_of[name]) for name, layer in layers.items()}


def bind_layers(
    layers: Mapping[str, Attention], caches: Mapping[str, KVCache], backend: Callable[[AttentionSpec], AttentionBackend]
) -> None:
    """Give each layer its cache and a backend, which layers of one spec share."""
    backends: dict[AttentionSpec, AttentionBackend] = {}
    for name, layer in layers.items():
        if layer.spec not in backends:
            backends[layer.spec] = backend(layer.spec)
        layer.bind(backends[layer.spec], caches[name])


def check_bound(layers: Mapping[str, Attention], caches: Mapping[str, KVCache]) -> None:
    """Raise `StateError` when the layers have been bound to another cache since."""
    name, layer = next(iter(layers.items()))
    if layer.kv_cache is not caches[name]:
        raise StateError(
            "another runner was built for this module: its attention layers read that runner's KV cache now",
            hint="give each runner that lives at the same time a module of its own; a deepcopy may share the parameters",
        )


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
