"""Our own paged attention: prefill, decode and mixed batches in one launch of Triton (and a reduce when keys are split); decodes
that the kernel in CUDA C++ takes go through that."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch

from rung.attention.backends.decode_attention import (
    FreshKeys,
    decode_attention,
    plan_decode,
    why_not_decode,
    why_not_decode_layer,
    why_not_rotated,
)
from rung.attention.backends.launch_plan import (
    KEYS_A_SPLIT,
    MAX_SPLITS,
    Launch,
    invariant_launch,
    padded,
    plan_launch,
    query_blocks,
    rehearsal_batches,
)
from rung.attention.backends.rotary_write import rotate_and_write_triton
from rung.attention.backends.strides import cache_strides, rows
from rung.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, BatchBounds, CaptureSupport, KVCache
from rung.attention.rotation import Rotation
from rung.errors import ConfigError
from rung.launch import TritonLauncher, launches_early, multiprocessors, workspace
from rung.torch_compat import triton_interpreted

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_KERNELS = "rung.attention.backends.triton_kernels"  # named, not imported: it needs Triton, which a warm start does without
WRITE_KV = TritonLauncher(_KERNELS, "write_kv_kernel")
PAGED_ATTENTION = TritonLauncher("rung.attention.backends.triton_attention", "paged_attention_kernel")
REDUCE_SPLITS = TritonLauncher(_KERNELS, "reduce_splits_kernel")
ZERO_PADDED_ROWS = TritonLauncher(_KERNELS, "zero_padded_rows_kernel")


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """The reason why Triton kernels cannot run on `device`, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and not triton_interpreted():
        return f"Triton kernels need a CUDA device, not {device.type!r}"
    return None


def write_kv_triton(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Scatter keys and values into the cache by slot with one kernel; a negative slot writes nothing."""
    num_tokens, (_, num_kv_heads, head_size) = slot_mapping.shape[0], key.shape
    if num_tokens == 0:
        return
    stride = cache_strides(cache)
    columns = padded(head_size)
    heads = min(1 << (num_kv_heads - 1).bit_length(), max(1, 2048 // columns))
    WRITE_KV.run(
        (num_tokens, -(-num_kv_heads // heads), 1),
        rows(key, "key"), rows(value, "value"), cache.key, cache.value, slot_mapping,
        1.0 / cache.key_scale, 1.0 / cache.value_scale,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), stride[0], stride[1], stride[2], SCALED=cache.is_fp8,
        NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=cache.block_size, HEADS=heads, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def zero_padded_rows_triton(out: torch.Tensor, query_start_loc: torch.Tensor) -> None:
    """Zero the rows of `out` behind query_start_loc[-1], which is read on the device."""
    if out.shape[0] == 0:
        return
    row = out.shape[1] * out.shape[2]
    if out.stride(1) != out.shape[2] or out.stride(2) != 1:
        raise ConfigError(f"out: rows must be contiguous, strides are {out.stride()}", hint="pass a contiguous output")
    ZERO_PADDED_ROWS.run(
        (out.shape[0], 1, 1),
        out, query_start_loc, query_start_loc.shape[0] - 1, out.stride(0), ROW=row, STEP=min(padded(row), 2048), num_warps=4,
    )  # fmt: skip


class TritonPaged(AttentionBackend):
    """Triton paged attention. All lengths are read on the device, so it captures mixed batches; sums are float32.

    The partial results of split keys are the allocator's for the call, in a capture from the graph's pool; of launches that are written
    down they lie in the memory of the record. `launch` overrides the planned launch of Triton, for tuning, and keeps decodes with it.
    Batch invariant: one launch of Triton for prompts and decodes, no split keys, and always over the cache."""

    name: ClassVar[str] = "triton_paged"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.ALWAYS

    def __init__(self, spec: AttentionSpec, launch: Launch | None = None, *, batch_invariant: bool = False) -> None:
        super().__init__(spec, batch_invariant=batch_invariant)
        self.launch = launch

    @classmethod
    def why_not_batch_invariant(cls) -> str | None:
        return None

    @classmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if (reason := why_no_triton(device)) is not None:
            return reason
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "the device's compute capability is below 8.0"
        if dtype not in _DTYPES:
            return f"{dtype} is not one of {', '.join(map(str, _DTYPES))}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads cannot be grouped over {spec.num_kv_heads} KV heads"
        if spec.head_size > 256:
            return f"head size {spec.head_size} is above 256"
        if spec.num_heads // spec.num_kv_heads > 128:
            return f"{spec.num_heads // spec.num_kv_heads} query heads a KV head are above 128"
        if block_size % 16:
            return f"block size {block_size} is no multiple of 16"
        if spec.scale <= 0:
            return f"scale {spec.scale} is not positive"
        return None

    def rehearsal(self, limits: BatchBounds, block_size: int, dtype: torch.dtype, device: torch.device) -> Sequence[BatchBounds]:
        return rehearsal_batches(self.spec, limits, block_size=block_size, processors=multiprocessors(device), element_size=dtype.itemsize)

    @classmethod
    def why_not_fp8_cache(cls, device: torch.device) -> str | None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "Triton converts e4m3 from compute capability 8.9 on"
        return None

    @classmethod
    def why_not_fp8_output(cls, device: torch.device) -> str | None:
        return TritonPaged.why_not_fp8_cache(device)  # the same conversion

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        write_kv_triton(key, value, cache, slot_mapping)

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
        rotate_and_write_triton(query, key, value, rotation, rotated, cache, slot_mapping)

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._attend_cache(query, cache, out, metadata, None)

    def forward_given_keys(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        if self.batch_invariant or not metadata.only_first_chunks:
            self.forward(query, cache, out, metadata)
        else:
            self._attend_given(query, key, value, out, metadata, None)

    def forward_quantised(
        self,
        query: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor,
        scale: torch.Tensor,
        metadata: AttentionMetadata,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        if self.why_not_fp8_output(query.device) is not None:
            super().forward_quantised(query, cache, out, scale, metadata, given)
        elif given is not None and metadata.only_first_chunks and not self.batch_invariant:
            self._attend_given(query, *given, out, metadata, scale)
        else:
            self._attend_cache(query, cache, out, metadata, scale)

    def rotate_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        cache: KVCache,
        out: torch.Tensor,
        metadata: AttentionMetadata,
        out_scale: torch.Tensor | None = None,
    ) -> bool:
        if metadata.slot_mapping.shape[0] != query.shape[0] or not self._decodes(query, cache, out, metadata):
            return False
        fresh = FreshKeys(key=key, value=value, rotation=rotation, slot_mapping=metadata.slot_mapping)
        if why_not_rotated(query, fresh) is not None:
            return False
        self._decode(query, cache, out, metadata, out_scale, fresh)
        return True

    def joins_rotation(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self.launch is None and not self.batch_invariant and why_not_decode_layer(self.spec, dtype, device) is None

    def launch_key(
        self, query: torch.Tensor, key: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, *, fresh: bool
    ) -> Hashable | None:
        if metadata.max_query_len == 1:
            return "decodes", -(-metadata.max_seq_len // KEYS_A_SPLIT), self.launch  # plans for decodes change at multiples of it alone
        given = fresh and not self.batch_invariant and metadata.only_first_chunks
        keys, block_size = (key, 0) if given else (cache.key, cache.block_size)
        return given, self.launch or self._plan(query, keys, metadata, block_size)

    def _attend_cache(
        self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata, out_scale: torch.Tensor | None
    ) -> None:
        if self._decodes(query, cache, out, metadata):
            self._decode(query, cache, out, metadata, out_scale, None)
            return
        block, slot, head, _ = cache_strides(cache)
        strides, scales = (block, slot, head, slot, head), (cache.key_scale, cache.value_scale)
        self._attend(query, cache.key, cache.value, cache.block_size, strides, out, metadata, scales, out_scale)

    def _decodes(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> bool:
        """Whether the batch goes through the decode kernel of our own in CUDA C++."""
        if metadata.max_query_len > 1 or self.launch is not None or self.batch_invariant or not (metadata.num_requests and len(query)):
            return False
        return why_not_decode(query, cache, out, self.spec) is None

    def _decode(
        self,
        query: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor,
        metadata: AttentionMetadata,
        out_scale: torch.Tensor | None,
        fresh: FreshKeys | None,
    ) -> None:
        launch = plan_decode(self.spec, query.shape[0], metadata.max_seq_len, kept_size=cache.key.element_size())
        decode_attention(self.spec, launch, query, cache, out, metadata, out_scale, fresh)

    def _attend_given(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        metadata: AttentionMetadata,
        out_scale: torch.Tensor | None,
    ) -> None:
        stride = (0, *rows(key, "key").stride()[:2], *rows(value, "value").stride()[:2])
        self._attend(query, key, value, 0, stride, out, metadata, out_scale=out_scale)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,  # the cache, or the flat batch
        values: torch.Tensor,
        block_size: int,  # 0: the flat batch
        strides: tuple[int, ...],  # of a block, of a slot and a head of the keys, of a slot and a head of the values
        out: torch.Tensor,
        metadata: AttentionMetadata,
        kept: tuple[float, float] = (1.0, 1.0),  # scales of keys and values
        out_scale: torch.Tensor | None = None,  # [1], of an e4m3 out
    ) -> None:
        num_tokens, num_heads, head_size = query.shape
        if num_tokens == 0:
            return
        spec, launch = self.spec, self.launch or self._plan(query, keys, metadata, block_size)
        scales, sums = self._workspace(query, launch.splits)
        columns = padded(head_size)
        blocks = query_blocks(num_tokens, metadata.num_requests, launch.block_q)
        early = launch.splits > 1 and launches_early(query.device)
        scaled, out_scale = out_scale is not None, query if out_scale is None else out_scale
        PAGED_ATTENTION.run(
            (spec.num_kv_heads, blocks, launch.splits),
            rows(query, "query"), rows(out, "out"), keys, values,
            metadata.query_start_loc, metadata.seq_lens, metadata.block_table, sums, scales, out_scale,
            num_tokens, metadata.num_requests, float(spec.scale * kept[0]), float(kept[1]), float(spec.soft_cap or 1.0),
            query.stride(0), query.stride(1), out.stride(0), out.stride(1), *strides, metadata.block_table.stride(0),
            GROUP=num_heads // spec.num_kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
            BLOCK_Q=launch.block_q, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, COLUMNS=columns,
            WINDOW=spec.sliding_window or 0, HAS_SOFT_CAP=spec.soft_cap is not None, SPLIT=launch.splits > 1,
            OUT_SCALED=scaled, WIDEN=_widens(query, values), EARLY=early,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        if launch.splits > 1:
            REDUCE_SPLITS.run(
                (num_tokens, num_heads, 1),
                out, sums, scales, query, out_scale, launch.splits, out.stride(0), out.stride(1),
                OUT_SCALED=scaled, HEAD_SIZE=head_size, COLUMNS=columns, MAX_SPLITS=MAX_SPLITS, STEP=16,
                EARLY=early, num_warps=2, launch_pdl=early,
            )  # fmt: skip

    def _plan(self, query: torch.Tensor, keys: torch.Tensor, metadata: AttentionMetadata, block_size: int) -> Launch:
        if self.batch_invariant:
            return invariant_launch(self.spec, query.element_size())
        return plan_launch(
            self.spec,
            num_tokens=query.shape[0],
            num_requests=metadata.num_requests,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            block_size=block_size,
            processors=multiprocessors(query.device),
            element_size=query.element_size(),
            kept_size=keys.element_size(),
        )

    @staticmethod
    def _workspace(query: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales [num_tokens, num_heads, splits] and sums [..., head_size], both float32. Without splits the kernel uses neither."""
        if splits == 1:
            return query, query
        shape = (*query.shape[:2], splits)
        return workspace(shape, torch.float32, query.device), workspace((*shape, query.shape[2]), torch.float32, query.device)


def _widens(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel converts e4m3 values in machine code, which Triton's interpreter does not read."""
    return values.dtype == torch.float8_e4m3fn and query.element_size() == 2 and not triton_interpreted()
