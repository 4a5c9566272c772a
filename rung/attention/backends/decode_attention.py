"""Launching decode attention of our own in CUDA C++. Names the kernel, compiles nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from rung.attention.backends.strides import cache_strides, rows
from rung.attention.base import AttentionMetadata, AttentionSpec, KVCache
from rung.launch import TritonLauncher, why_no_nvrtc

DECODE = TritonLauncher("rung.attention.backends.decode_kernel", "decode_attention_kernel")
_HEAD_SIZES = (64, 128)
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch:
    """How each KV head of a request is read: `blocks` of a cluster with `warps` each, with room for `slots` tiles of 16 keys a warp."""

    warps: int
    blocks: int
    slots: int


def plan_decode(num_programs: int, max_seq_len: int, *, kept_size: int) -> DecodeLaunch:
    """The launch for so many (request, KV head) pairs."""
    slots = 3 if kept_size > 1 else 6
    if num_programs >= 1024:
        return DecodeLaunch(warps=1, blocks=1, slots=slots)
    if num_programs >= 256:
        return DecodeLaunch(warps=4, blocks=1, slots=slots)
    if num_programs >= 64:
        return DecodeLaunch(warps=16, blocks=1, slots=slots)
    return DecodeLaunch(warps=16, blocks=4 if max_seq_len > 512 else 1, slots=slots)


@functools.cache
def why_not_decode(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason against the kernel for layers like these, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it is for compute capability 9.0"
    if dtype not in _DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, _DTYPES))}"
    if spec.head_size not in _HEAD_SIZES:
        return f"head size {spec.head_size} is not one of {', '.join(map(str, _HEAD_SIZES))}"
    if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
        return f"{spec.num_heads // spec.num_kv_heads} query heads a KV head are above {_MAX_GROUP}"
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
    *,
    programmatic: bool = True,
) -> None:
    """query and out [num_tokens, num_heads, head_size], one token a request at most; out e4m3 with `out_scale` [1], float32."""
    block, slot, head, _ = cache_strides(cache)
    table = metadata.block_table
    DECODE.run(
        (spec.num_kv_heads, query.shape[0], 1),
        rows(query, "query"), rows(out, "out"), cache.key, cache.value, metadata.query_start_loc, metadata.seq_lens, table,
        query if out_scale is None else out_scale, metadata.num_requests,
        float(spec.scale * cache.key_scale), float(cache.value_scale), float(spec.soft_cap or 1.0),
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), block, slot, head, table.stride(0), table.shape[1],
        GROUP=spec.num_heads // spec.num_kv_heads, HEAD_SIZE=spec.head_size, BLOCK_SIZE=cache.block_size, E4M3=cache.is_fp8,
        FP16=query.dtype == torch.float16, WINDOW=spec.sliding_window or 0, SOFT_CAP=spec.soft_cap is not None,
        OUT_SCALED=out_scale is not None, WARPS=launch.warps, BLOCKS=launch.blocks, SLOTS=launch.slots, PROGRAMMATIC=programmatic,
        num_warps=launch.warps, num_ctas=launch.blocks, launch_pdl=programmatic,
    )  # fmt: skip
