"""KV-cache groups: layers that see equally far back share block tables, and each group has blocks of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rung.attention import Attention
from rung.runner.config import RunnerConfig


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one sliding window, or all without one. A block id of the group means one block in each of its layers."""

    layers: tuple[str, ...]
    window: int | None  # tokens that a query attends to, itself included; None: all
    block_bytes: int  # keys and values of one block, all layers of the group


def kv_groups(layers: Mapping[str, Attention], config: RunnerConfig, dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """Full attention first, then the windows from wide to narrow. A window that no request can outgrow is none."""
    by_window: dict[int | None, list[Attention]] = {}
    for layer in layers.values():
        window = layer.spec.sliding_window
        by_window.setdefault(None if window is None or window >= config.max_model_len else window, []).append(layer)
    return tuple(
        KVGroup(tuple(layer.name for layer in by_window[window]), window, block_bytes(by_window[window], config.block_size, dtype))
        for window in sorted(by_window, key=lambda window: -(window or config.max_model_len))
    )


def block_bytes(layers: Sequence[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over some layers, keys and values."""
    return sum(2 * block_size * layer.spec.num_kv_heads * layer.spec.head_size * dtype.itemsize for layer in layers)


def windows_of(groups: Sequence[KVGroup]) -> tuple[int | None, ...]:
    return tuple(group.window for group in groups)


def cache_bytes(config: RunnerConfig, groups: Sequence[KVGroup], num_blocks: int) -> int:
    """Bytes of the cache when `group_blocks` says how many blocks each group gets."""
    counts = group_blocks(config, windows_of(groups), num_blocks)
    return sum(count * group.block_bytes for count, group in zip(counts, groups, strict=True))


def blocks_in(config: RunnerConfig, groups: Sequence[KVGroup], budget: int) -> int:
    """The largest `num_blocks` whose cache fits into the budget."""
    return (
        bisect_right(range(budget // min(group.block_bytes for group in groups) + 2), budget, key=partial(cache_bytes, config, groups)) - 1
    )


def first_block(num_computed_tokens: int, window: int | None, block_size: int) -> int:
    """The first block that a query behind so many computed tokens attends to; earlier ones lie behind the window."""
    return 0 if window is None else max(0, num_computed_tokens - window + 1) // block_size


def blocks_per_request(config: RunnerConfig, window: int | None) -> int:
    """Blocks that one request of a group owns at most."""
    if window is None:
        return config.max_blocks_per_request
    ahead = max(config.prefill_chunk, config.replay_steps)  # tokens that one plan adds
    return min(config.max_blocks_per_request, -(-(window - 1 + ahead) // config.block_size) + 1)


def group_blocks(config: RunnerConfig, windows: Sequence[int | None], num_blocks: int) -> tuple[int, ...]:
    """Blocks of each group, its null block included: `num_blocks` for the group whose requests own most, for the others as many as the same
    number of requests of full length needs."""
    needs = [blocks_per_request(config, window) for window in windows]
    return tuple(1 + -(-(num_blocks - 1) * need // max(needs)) for need in needs)


def most_kv_blocks(config: RunnerConfig, groups: Sequence[KVGroup]) -> int:
    """`num_blocks` for every slot at its full length. More would never be used."""
    return config.max_num_requests * max(blocks_per_request(config, group.window) for group in groups) + 1
