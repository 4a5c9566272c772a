"""Attention through the FlashAttention libraries, when one is there.

Version 3 comes as the package `flash_attn_interface`, or as the library that RUNG_FLASH_ATTN_LIBRARY names: a shared object that
registers `torch.ops._vllm_fa3_C.fwd`. Version 2 comes as the package `flash_attn` (the extra `flash-attn`). Page sizes: version 3 takes
multiples of 16, version 2 only multiples of 256.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from rung.attention.backends.kv_write import write_kv_torch
from rung.attention.backends.rotary_write import rotate_and_write_triton
from rung.attention.backends.triton_paged import why_no_triton, write_kv_triton, zero_padded_rows_triton
from rung.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, CaptureSupport, KVCache
from rung.attention.rotation import Rotation
from rung.config import variable
from rung.launch import multiprocessors
from rung.torch_compat import in_dispatch_mode, no_dispatch_modes

_VARIABLE = "RUNG_FLASH_ATTN_LIBRARY"
_NEVER_SPLIT = 4096  # keys that one program reads in about 50 us
_HALF = (torch.float16, torch.bfloat16)


def library_path() -> str | None:
    """The FlashAttention-3 library named by RUNG_FLASH_ATTN_LIBRARY, or None."""
    return variable(_VARIABLE)


@functools.cache
def _library_functions(path: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Attention, and the scheduler's metadata for it."""
    torch.ops.load_library(path)
    library = torch.ops._vllm_fa3_C
    return library.fwd.default, library.get_scheduler_metadata.default


def _why_not_here(spec: AttentionSpec, dtype: torch.dtype, device: torch.device, capability: tuple[int, int]) -> str | None:
    if device.type != "cuda":
        return f"FlashAttention needs a CUDA device, not {device.type!r}"
    if torch.cuda.get_device_capability(device) < capability:
        return f"the device's compute capability is below {capability[0]}.{capability[1]}"
    if dtype not in _HALF:
        return f"{dtype} is neither float16 nor bfloat16"
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} heads cannot be grouped over {spec.num_kv_heads} KV heads"
    if spec.head_size % 8 or spec.head_size > 256:
        return f"head size {spec.head_size} is no multiple of 8 up to 256"
    return None


class _FlashAttention(AttentionBackend):
    """What the versions share: the rotation and KV write, the windows, and zeroing the rows that the libraries leave alone."""

    @classmethod
    def why_not_fp8_cache(cls, device: torch.device) -> str | None:
        return "FlashAttention reads an e4m3 cache only with e4m3 queries"

    @classmethod
    def why_not_fp8_output(cls, device: torch.device) -> str | None:
        return "FlashAttention writes its output in the model's dtype only"

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        write = write_kv_torch if why_no_triton(key.device) else write_kv_triton
        write(key, value, cache, slot_mapping)

    def rotate_and_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        rotated: torch.Tensor,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        write = super().rotate_and_write if why_no_triton(key.device) else rotate_and_write_triton
        write(query, key, value, rotation, rotated, cache, slot_mapping)

    @property
    def _window(self) -> tuple[int, int]:
        # The libraries count the keys to the left of a row's own.
        return (-1, -1) if self.spec.sliding_window is None else (self.spec.sliding_window - 1, 0)

    @staticmethod
    def _zero_padded_rows(out: torch.Tensor, metadata: AttentionMetadata) -> None:
        if not metadata.may_pad:
            return
        if metadata.host is not None:
            used = int(metadata.host.query_start_loc[-1])
            if used < out.shape[0]:
                out[used:].zero_()
        elif why_no_triton(out.device) is None:
            zero_padded_rows_triton(out, metadata.query_start_loc)
        else:
            padded = torch.arange(out.shape[0], device=out.device) >= metadata.query_start_loc[-1]
            out.masked_fill_(padded[:, None, None], 0)


def most_splits(spec: AttentionSpec, metadata: AttentionMetadata, processors: int) -> int:
    """Shares of the keys of one request at most: 1, or 0 for what the library derives from the longest request that may come.

    Its scheduler then chooses on the device, but the kernels for splits cost up to a tenth even where it chooses one. So decodes that fill
    the device by themselves are not split, unless one long request could keep the others waiting."""
    alone = metadata.max_query_len == 1 and metadata.num_requests * spec.num_kv_heads >= processors
    return 1 if alone and metadata.max_seq_len <= _NEVER_SPLIT else 0


class FlashAttention3(_FlashAttention):
    """FlashAttention-3 (Hopper). Lengths are read on the device, so it captures mixed batches."""

    name: ClassVar[str] = "flash_attn"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.ALWAYS

    @classmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if (reason := _why_not_here(spec, dtype, device, (9, 0))) is not None:
            return reason
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "FlashAttention-3 is built for compute capability 9.x"
        if block_size % 16:
            return f"block size {block_size} is no multiple of 16"
        path = library_path()
        if path is not None:
            return None if os.path.isfile(path) else f"{_VARIABLE} names {path!r}, which is no file"
        if importlib.util.find_spec("flash_attn_interface") is None:
            return f"the package flash_attn_interface is not installed and {_VARIABLE} is not set"
        return None

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        path = library_path()
        self.num_splits: int | None = None  # shares of the keys at most; None: as `most_splits` says
        self._library: Callable[..., Any] | None = None
        self._scheduler: Callable[..., Any] | None = None
        if path is not None:
            self._library, self._scheduler = _library_functions(path)

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        if query.shape[0] == 0:
            return
        if self._library is None:
            self._forward_package(query, cache, out, metadata)
        else:
            self._forward_library(query, cache, out, metadata)
        self._zero_padded_rows(out, metadata)

    def _forward_library(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        if in_dispatch_mode():  # without splits the library returns undefined tensors in a list, which no mode can hand on
            with no_dispatch_modes():
                return self._forward_library(query, cache, out, metadata)
        assert self._library is not None
        left, right = self._window
        splits = self.num_splits
        if splits is None:
            splits = most_splits(self.spec, metadata, multiprocessors(query.device))
        # A schedule that is shared is put back by the kernel that joins the splits. Without one that would be a kernel more, no fewer.
        schedule = None
        if splits != 1:
            schedule = metadata.once_a_step((self.name, self.spec), cache, lambda: self._schedule(query, cache, metadata, splits))
        self._library(
            query, cache.key, cache.value, None, None, None, out,  # q, k, v, k_new, v_new, q_v, out
            metadata.query_start_loc, None, None, None, metadata.seq_lens,  # cu_seqlens q, k, k_new; seqused q, k
            metadata.max_query_len, metadata.max_seq_len, metadata.block_table, None, None,  # kv_batch_idx, leftpad_k
            None, None, None, None, None, None,  # rotary cos, sin, seqlens; descale q, k, v
            self.spec.scale, True, left, right, self.spec.soft_cap or 0.0, True,  # is_rotary_interleaved
            schedule, splits, None, 0, None,  # scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux
            1, 0, None,  # context parallelism: world size, rank, lengths
        )  # fmt: skip

    def _schedule(self, query: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, splits: int) -> torch.Tensor:
        """The scheduler's metadata, int32, which depend on lengths alone. Each call would compute them by a kernel of its own, and leaves
        them as it found them: its last kernel puts the tile counter back to zero."""
        assert self._scheduler is not None
        spec, (left, right) = self.spec, self._window
        schedule: torch.Tensor = self._scheduler(
            metadata.num_requests, metadata.max_query_len, metadata.max_seq_len, spec.num_heads, spec.num_kv_heads,
            spec.head_size, spec.head_size, query.dtype, metadata.seq_lens,  # head size of the values, seqused_k
            metadata.query_start_loc, None, None, None, None,  # cu_seqlens q, k, k_new; seqused_q, leftpad_k
            cache.block_size, 0, True, left, right, spec.soft_cap is not None,  # page_size, max_seqlen_k_new, is_causal
            splits, None, 0,  # pack_gqa, sm_margin
        )  # fmt: skip
        return schedule

    def _forward_package(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        interface = importlib.import_module("flash_attn_interface")
        result = interface.flash_attn_with_kvcache(
            query,
            cache.key,
            cache.value,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=self._window,
            softcap=self.spec.soft_cap or 0.0,
        )
        out.copy_(result[0] if isinstance(result, tuple) else result)


class FlashAttention2(_FlashAttention):
    """FlashAttention-2. Its launch depends on the longest query, so it captures uniform batches only."""

    name: ClassVar[str] = "flash_attn_2"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.UNIFORM_BATCH

    @classmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if (reason := _why_not_here(spec, dtype, device, (8, 0))) is not None:
            return reason
        if block_size % 256:
            return f"FlashAttention-2 takes pages of a multiple of 256 tokens, and the block size is {block_size}"
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash_attn is not installed (extra flash-attn)"
        return None

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        if query.shape[0] == 0:
            return
        interface = importlib.import_module("flash_attn")
        key_starts = torch.zeros(metadata.num_requests + 1, dtype=torch.int32, device=query.device)
        torch.cumsum(metadata.seq_lens, 0, dtype=torch.int32, out=key_starts[1:])
        result = interface.flash_attn_varlen_func(
            query,
            cache.key,
            cache.value,
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=key_starts,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=self._window,
            softcap=self.spec.soft_cap or 0.0,
            block_table=metadata.block_table,
        )
        out.copy_(result)
        self._zero_padded_rows(out, metadata)
