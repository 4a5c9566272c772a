"""Scatter of keys and values into the paged cache with torch ops alone; capturable."""

from __future__ import annotations

import torch

from rung.attention.base import KVCache


def write_kv_torch(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Write `key` and `value` ([num_tokens, num_kv_heads, head_size]) to their slots; rows with a negative slot write nothing.

    Selecting the valid rows would need their number on the host, and plain indexing takes -1 for the last slot. So every padded row
    becomes a copy of the first valid row, slot included: writing one value twice is no race. When no row is valid, all of them write
    to slot 0 what stands there already."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    valid = slot_mapping >= 0  # [num_tokens]
    rows = torch.arange(num_tokens, device=slot_mapping.device)
    source = torch.where(valid, rows, valid.to(torch.int32).argmax())  # argmax: the first valid row, 0 when there is none
    slots = slot_mapping[source].clamp(min=0)
    block, offset = slots // cache.block_size, slots % cache.block_size
    writes = valid.any()
    for store, new, scale in ((cache.key, key, cache.key_scale), (cache.value, value, cache.value_scale)):
        kept = (new.float() / scale).clamp(-448.0, 448.0) if cache.is_fp8 else new
        store.index_put_((block, offset), torch.where(writes, kept[source].to(store.dtype), store[0, 0]))
