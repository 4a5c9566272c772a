"""Rotation and cache write as one kernel."""

from __future__ import annotations

import torch

from rung.attention.backends.strides import cache_strides, rows
from rung.attention.base import KVCache
from rung.attention.rotation import Rotation
from rung.launch import TritonLauncher, launches_early

_KERNELS = "rung.attention.backends.rotary_kernels"  # named, not imported: it needs Triton, which a warm start does without
ROTATE_AND_WRITE = TritonLauncher(_KERNELS, "rotate_and_write_kernel")
_PAIRS = 512  # a program rotates


def rotate_and_write_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    rotated: torch.Tensor,
    cache: KVCache,
    slot_mapping: torch.Tensor,
) -> None:
    """`AttentionBackend.rotate_and_write` with one kernel, for a cache of any floating point type."""
    num_tokens, (_, num_kv_heads, head_size) = slot_mapping.shape[0], key.shape
    if num_tokens == 0:
        return
    cos, sin, num_heads = rotation.cos, rotation.sin, query.shape[1]
    half = cos.shape[-1]
    columns = _power_of_two(half)
    heads = max(1, min(_power_of_two(num_heads), _PAIRS // columns))
    stride = cache_strides(cache)
    weights = rotation.query_weight, rotation.key_weight
    early = launches_early(query.device)
    ROTATE_AND_WRITE.run(
        (num_tokens, -(-num_heads // heads) + -(-num_kv_heads // heads), 1),
        rows(query, "query"), rows(key, "key"), rows(value, "value"), rows(rotated, "rotated"), cache.key, cache.value,
        rows(cos, "cos"), rows(sin, "sin"), *(query if weight is None else rows(weight, "weight") for weight in weights), slot_mapping,
        float(rotation.epsilon), float(rotation.offset), 1.0 / cache.key_scale, 1.0 / cache.value_scale,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        rotated.stride(0), rotated.stride(1), cos.stride(0), sin.stride(0), stride[0], stride[1], stride[2],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=cache.block_size, HALF=half,
        HALF_COLUMNS=columns, REST_COLUMNS=_power_of_two(max(1, head_size - 2 * half)), HEADS=heads, NORM=weights[0] is not None,
        SCALED=cache.is_fp8, EARLY=early, num_warps=2, launch_pdl=early,
    )  # fmt: skip


def _power_of_two(size: int) -> int:
    """`size` rounded up."""
    return 1 << (size - 1).bit_length()
