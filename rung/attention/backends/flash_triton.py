"""FlashAttention-3 for prompts, our own kernels for decodes. Both read the same cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from rung.attention.backends.flash_attn import FlashAttention3
from rung.attention.backends.triton_paged import TritonPaged
from rung.attention.base import AttentionMetadata, AttentionSpec, BatchBounds, CaptureSupport, KVCache

_LARGEST_HEAD = 128  # up to here ours decode as fast or faster at every size measured, docs/performance.md


class FlashTriton(TritonPaged):
    """Batches in which every request has one token go through `TritonPaged`: one kernel, two where it splits the keys, none for padding."""

    name: ClassVar[str] = "flash_triton"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.ALWAYS

    @classmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if spec.head_size > _LARGEST_HEAD:
            return f"FlashAttention-3 decodes heads of {spec.head_size} itself"
        reasons = (backend.why_not(spec, dtype, device, block_size) for backend in (FlashAttention3, TritonPaged))
        return next((reason for reason in reasons if reason is not None), None)

    @classmethod
    def why_not_fp8_cache(cls, device: torch.device) -> str | None:
        return FlashAttention3.why_not_fp8_cache(device)

    @classmethod
    def why_not_fp8_output(cls, device: torch.device) -> str | None:
        return FlashAttention3.why_not_fp8_output(device)

    @classmethod
    def why_not_batch_invariant(cls) -> str | None:
        return FlashAttention3.why_not_batch_invariant()

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._prompts = FlashAttention3(spec)

    def rehearsal(self, limits: BatchBounds, block_size: int, dtype: torch.dtype, device: torch.device) -> Sequence[BatchBounds]:
        return super().rehearsal(replace(limits, max_query_len=1), block_size, dtype, device)

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        decodes = metadata.max_query_len == 1
        (super().forward if decodes else self._prompts.forward)(query, cache, out, metadata)

    def forward_given_keys(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        self.forward(query, cache, out, metadata)

    rotate_and_attend = TritonPaged.rotate_and_attend  # of decodes alone, whose forward is Triton's backend too

    def launch_key(
        self, query: torch.Tensor, key: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, *, fresh: bool
    ) -> Hashable | None:
        """Decodes alone: the library's work is its own."""
        return super().launch_key(query, key, cache, metadata, fresh=False) if metadata.max_query_len == 1 else None
