"""Launching decode attention of our own in CUDA C++. Names the kernel, compiles nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from rung.attention.backends.decode_instructions import MAX_GROUP, TILE
from rung.attention.backends.strides import cache_strides, rows
from rung.attention.base import AttentionMetadata, AttentionSpec, KVCache
from rung.attention.rotation import Rotation
from rung.launch import TritonLauncher, why_no_nvrtc
from rung.launch.tensor_map import ALIGNMENT

DECODE = TritonLauncher("rung.attention.backends.decode_kernel", "decode_attention_kernel")
_HEAD_SIZES = (64, 128)
_DTYPES = (torch.bfloat16, torch.float16)
_SHORT = 4096  # keys that a warp or two go through alone
_ONE_BLOCK = 512  # keys for which several blocks a head do not pay
DECODE_LENGTHS = (_ONE_BLOCK, _SHORT, _SHORT + 1)  # bounds of lengths that together take every kernel
_PROCESSORS, _SHARED_BYTES = 132, 227 << 10  # of an H200, and of one of its multiprocessors
_MOST_BLOCKS = 8  # of a cluster, on every device that has clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch:
    """How each KV head of a request is read: `blocks` of a cluster with `warps` each, with room for `slots` tiles of 16 keys a warp."""

    warps: int
    blocks: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshKeys:
    """This step's keys and values [num_tokens, num_kv_heads, head_size] as the projection made them, and where they belong."""

    key: torch.Tensor
    value: torch.Tensor
    rotation: Rotation
    slot_mapping: torch.Tensor  # int64 [num_tokens]


def plan_decode(spec: AttentionSpec, num_tokens: int, max_seq_len: int, *, kept_size: int) -> DecodeLaunch:
    """The launch for so many decodes of at most `max_seq_len` keys, each of `kept_size` bytes a number. Found on an H200, and the same for
    every device, since it decides which kernel it is.

    What bounds it is bytes in flight, and edges: all blocks should run at once. Where heads are few, several warps share one, and where
    they are fewer than multiprocessors several blocks do, unless requests are too short for it to pay."""
    programs = max(1, num_tokens * spec.num_kv_heads)
    if programs <= 2 * _PROCESSORS:
        warps = 8 if programs <= _PROCESSORS else 4
    elif max_seq_len <= _SHORT:
        warps = 2 if programs <= 1024 else 1
    else:
        warps = 4  # one long request must not keep the others waiting for too long
    most = max(_PROCESSORS // 2 // programs, min(2, _PROCESSORS // programs), 1) if max_seq_len > _ONE_BLOCK else 1
    blocks = min(_MOST_BLOCKS, 1 << (most.bit_length() - 1))
    tile = TILE * spec.head_size * kept_size

    def at_once(slots: int) -> int:
        """Blocks that fit on the device."""
        return _PROCESSORS * (_SHARED_BYTES // (warps * (slots * tile + 2 * tile // TILE) + 1024))

    few, more = (4, 6) if tile <= 2048 else (3, 4)
    return DecodeLaunch(warps=warps, blocks=blocks, slots=more if at_once(more) >= programs * blocks else few)


def why_not_decode(query: torch.Tensor, cache: KVCache, out: torch.Tensor, spec: AttentionSpec) -> str | None:
    """The reason against the kernel for such a call, or None. Reads no size of dimension 0."""
    if any(number % 8 for one in (query, out) for number in (one.storage_offset(), *one.stride()[:2])):
        return "heads of queries or of the output are not aligned to 16 bytes"
    number = ALIGNMENT // cache.key.element_size()
    if any(offset % number for half in (cache.key, cache.value) for offset in (half.storage_offset(), *half.stride()[:3])):
        return "keys are not aligned to 16 bytes"
    return why_not_decode_layer(spec, query.dtype, query.device)


def why_not_rotated(query: torch.Tensor, fresh: FreshKeys) -> str | None:
    """The reason why the kernel does not rotate such queries and keys itself, or None. Reads no size of dimension 0."""
    rotation = fresh.rotation
    half, circle = rotation.cos.shape[-1], (rotation.cos, rotation.sin)
    if half % TILE or not half:
        return f"{half} pairs of a head are rotated, no multiple of {TILE}"
    if rotation.cos.dtype != rotation.sin.dtype or rotation.cos.dtype not in (torch.float32, query.dtype):
        return f"cosines are of dtype {rotation.cos.dtype}"
    if any(one.stride(-1) != 1 or one.stride(0) % 2 or one.storage_offset() % 2 for one in circle):
        return "rows of cosines are not aligned"
    made = (fresh.key, fresh.value)
    if any(one.stride(-1) != 1 or any(number % 2 for number in (one.storage_offset(), *one.stride()[:2])) for one in made):
        return "keys and values of the step are not aligned"
    for weight in (rotation.query_weight, rotation.key_weight):
        if weight is not None and (weight.dtype != query.dtype or weight.stride(0) != 1 or weight.storage_offset() % 2):
            return "weights of the norm are of another dtype, or not aligned"
    return None


@functools.cache
def why_not_decode_layer(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason against the kernel for layers like these, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it is for compute capability 9.0"
    if dtype not in _DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, _DTYPES))}"
    if spec.head_size not in _HEAD_SIZES:
        return f"head size {spec.head_size} is not one of {', '.join(map(str, _HEAD_SIZES))}"
    if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
        return f"{spec.num_heads // spec.num_kv_heads} query heads a KV head are above {MAX_GROUP}"
    if DECODE.road != "prebound":
        return f"launches go through {DECODE.road}"
    return why_no_nvrtc()


def decode_attention(
    spec: AttentionSpec,
    launch: DecodeLaunch,
    query: torch.Tensor,
    cache: KVCache,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    out_scale: torch.Tensor | None,
    fresh: FreshKeys | None = None,
    *,
    programmatic: bool = True,
) -> None:
    """query and out [num_tokens, num_heads, head_size], one token a request at most; out e4m3 with `out_scale` [1], float32. With `fresh`
    the query comes as the projection made it, and this step's keys and values are written to the cache; where the metadata is settled too,
    the kernel begins while the projection still runs."""
    block, slot, head, _ = cache_strides(cache)
    table = metadata.block_table
    rotation = None if fresh is None else fresh.rotation
    DECODE.run(
        (spec.num_kv_heads, query.shape[0], 1),
        rows(query, "query"), rows(out, "out"), cache.key, cache.value, metadata.query_start_loc, metadata.seq_lens, table,
        query if out_scale is None else out_scale, metadata.num_requests,
        float(spec.scale * cache.key_scale), float(cache.value_scale), float(spec.soft_cap or 1.0),
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), block, slot, head, table.stride(0), table.shape[1],
        *((query,) * 7 + (0.0,) * 4 + (0,) * 6 if fresh is None else _rotated(query, cache, fresh)),
        GROUP=spec.num_heads // spec.num_kv_heads, HEAD_SIZE=spec.head_size, BLOCK_SIZE=cache.block_size, E4M3=cache.is_fp8,
        FP16=query.dtype == torch.float16, WINDOW=spec.sliding_window or 0, SOFT_CAP=spec.soft_cap is not None,
        OUT_SCALED=out_scale is not None, WARPS=launch.warps, BLOCKS=launch.blocks, SLOTS=launch.slots, PROGRAMMATIC=programmatic,
        SETTLED=fresh is not None and metadata.settled, ROTATED=0 if rotation is None else rotation.cos.shape[-1],
        WIDE=rotation is not None and rotation.cos.dtype == torch.float32,
        NORM=rotation is not None and rotation.query_weight is not None,
        num_warps=launch.warps, num_ctas=launch.blocks, launch_pdl=programmatic,
    )  # fmt: skip


def _rotated(query: torch.Tensor, cache: KVCache, fresh: FreshKeys) -> tuple[Any, ...]:
    """The arguments of the kernel for the rotation and the write."""
    key, value, rotation = fresh.key, fresh.value, fresh.rotation
    weights = (query if weight is None else weight for weight in (rotation.query_weight, rotation.key_weight))
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1), rotation.cos.stride(0), rotation.sin.stride(0))
    factors = (float(rotation.epsilon), float(rotation.offset), 1.0 / cache.key_scale, 1.0 / cache.value_scale)
    return key, value, rotation.cos, rotation.sin, *weights, fresh.slot_mapping, *factors, *strides
