"""What an attention backend is given and what it owes.

The break contract of rung, in terms of attention:

* a backend writes every row of `out` in every call: rows of requests with their result, padded rows with zero;
* `write_kv` and `rotate_and_write` write nothing for rows whose slot is -1 and decide nothing on the host, so they are captured in every
  mode, with the piece before them;
* when `metadata.host` is None nothing may be decided on the host: all lengths are read on the device, the call is capturable, and the
  shapes of the metadata tensors plus `max_query_len` / `max_seq_len` (upper bounds) are all that may steer the launch;
* a backend keeps no reference to the metadata after the call;
* a backend whose work is launches through `rung.launch` alone may say so, and what decides about them (`launch_key`): a piecewise replay
  then repeats the launches of an earlier step without the backend's Python. What one kernel of a call writes for the next one comes from
  `rung.launch.workspace` in such a backend.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from rung.attention.rotation import Rotation, rotated_query_and_key

PAD_SLOT = -1  # slot mapping of a row that must not be written
JOINED = ("rotate_and_write", "forward", "forward_quantised")  # what `AttentionBackend.rotate_and_attend` stands for


class CaptureSupport(IntEnum):
    """Which batches a backend can run inside a captured graph; a higher value includes the lower ones."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # one query token for each request
    UNIFORM_BATCH = 2  # the same number of query tokens for each request
    ALWAYS = 3  # lengths are read on the device, so mixed batches too


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The static shape of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None  # keys further back than this are not attended; None: full attention
    soft_cap: float | None = None  # logits become cap * tanh(logits / cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMetadata:
    """Host copies of the lengths of a step, for backends that loop over requests. Absent while a FULL graph is captured or replayed."""

    query_start_loc: npt.NDArray[np.int32]  # [num_requests + 1]
    seq_lens: npt.NDArray[np.int32]  # [num_requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step's batch layout, shared by all layers of a KV-cache group. The runner owns the tensors until the next step."""

    query_start_loc: torch.Tensor  # int32 [num_requests + 1], non-decreasing; the tail of padded requests repeats num_actual_tokens
    seq_lens: torch.Tensor  # int32 [num_requests], keys of each request including this step's; 0 for padded requests
    block_table: torch.Tensor  # int32 [num_requests, max_blocks]; row i lists the cache blocks of request i, padded with 0
    slot_mapping: torch.Tensor  # int64 [num_tokens], block * block_size + offset of each row; PAD_SLOT for padded rows
    num_requests: int  # rows of the tensors above (padded under FULL)
    num_actual_tokens: int  # rows of requests; under FULL an upper bound, the true one is query_start_loc[-1]
    max_query_len: int  # upper bound over the requests
    max_seq_len: int  # upper bound over the requests
    host: HostMetadata | None = None
    settled: bool = False  # the tensors above and earlier steps' keys lie there before the kernel in front ends, whichever that is
    may_pad: bool = True  # False: every row belongs to a request (a padded request has one key, in block 0), so none is left to be zeroed

    _shared: dict[Hashable, tuple[KVCache, torch.Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once_a_step(self, key: Hashable, layer: KVCache, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` enqueued for the first layer that asked under `key`, for all layers of the step.

        The layer that made it makes it anew when it comes again: a warm-up and the capture behind it share one object, and the graph must
        hold the work itself."""
        found = self._shared.get(key)
        if found is None or found[0] is layer:
            found = self._shared[key] = (layer, make())
        return found[1]

    @property
    def only_first_chunks(self) -> bool:
        """Whether every request begins with this step, as the host knows: never while a FULL graph is captured, nor for plain decodes."""
        if self.host is None or self.max_query_len == 1:
            return False
        # No request has fewer keys than rows, so equal sums mean equal lengths.
        return int(self.host.seq_lens.sum()) == int(self.host.query_start_loc[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """What of a batch may steer a launch: its sizes and the upper bounds of its lengths, or the largest that there can be."""

    num_tokens: int
    num_requests: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class KVCache:
    """The paged keys and values of one layer. The runner owns the storage; its address never changes while a graph lives.

    A cache may be `float8_e4m3fn`. It then holds keys / `key_scale` and values / `value_scale`, clamped to the 448 that e4m3 reaches, and
    who reads multiplies. The scales are numbers, which a captured graph keeps; caches of other dtypes have scales of 1."""

    key: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_size]
    value: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_size]
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def is_fp8(self) -> bool:
        return self.key.dtype == torch.float8_e4m3fn

    @property
    def block_size(self) -> int:
        return self.key.shape[1]


@functools.cache
def answers_for(backend: type, method: str, forwards: tuple[str, ...]) -> bool:
    """Whether a class's `method` was written with its `forwards`, or after them: one that is inherited says nothing of a newer forward."""
    lineage = backend.__mro__

    def depth(name: str) -> int:
        return next((index for index, one in enumerate(lineage) if name in vars(one)), len(lineage))

    return all(depth(method) <= depth(name) for name in forwards)


class AttentionBackend(ABC):
    """Paged attention over a flat batch. Stateless: one instance serves all layers of one spec."""

    name: ClassVar[str]
    capture_support: ClassVar[CaptureSupport]

    @classmethod
    @abstractmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """The reason why this backend cannot serve such a layer here, or None when it can."""

    @classmethod
    def why_not_fp8_cache(cls, device: torch.device) -> str | None:
        """The reason why this backend does not take an e4m3 cache, or None when it does."""
        return "it keeps keys and values in the model's dtype only"

    @classmethod
    def why_not_fp8_output(cls, device: torch.device) -> str | None:
        """The reason why this backend gains nothing by writing its output as e4m3, or None when it can do so itself."""
        return "it writes its output in the model's dtype only"

    @classmethod
    def why_not_batch_invariant(cls) -> str | None:
        """The reason why the bits of a row depend on the other rows of its batch, or None when `batch_invariant` makes them independent."""
        return "how it sums depends on the batch"

    def __init__(self, spec: AttentionSpec, *, batch_invariant: bool = False) -> None:
        self.spec = spec
        self.batch_invariant = batch_invariant  # a row has the same bits in every batch, as a prompt's and as a decode's

    def rehearsal(self, limits: BatchBounds, block_size: int, dtype: torch.dtype, device: torch.device) -> Sequence[BatchBounds]:
        """Batches that, run once each, make the backend load every kernel that any batch within `limits` may ask for. None for backends
        whose kernels come loaded."""
        return ()

    def launch_key(
        self, query: torch.Tensor, key: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, *, fresh: bool
    ) -> Hashable | None:
        """What decides the launches of a `forward` of this batch beside the addresses, shapes and strides of its tensors: two batches with
        equal keys, equal `num_requests` and `settled`, and metadata at the same places are given the same kernels, grids and numbers, by
        `rotate_and_attend` and `rotate_and_write` too. None: the work is not launches of `rung.launch` alone. `fresh`: of
        `forward_given_keys`, with keys like `key`. Asked for one layer of those that share backend and metadata. A subclass that overrides
        one of them answers anew, or it is taken for None."""
        return None

    @abstractmethod
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        """Scatter `key` and `value` ([num_tokens, num_kv_heads, head_size]) into `cache` by slot; slot -1 writes nothing."""

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
        """Rotate `query` into `rotated` (same shape) and `key` into the cache, beside `value`. Every row of `rotated` is written, with zero
        where the slot is -1; all inputs may be strided views. This is what it means; a backend may do it with one kernel."""
        turned, key = rotated_query_and_key(query, key, rotation)
        # A padded row may hold NaN: it is replaced, not weighted.
        rotated.copy_(torch.where((slot_mapping >= 0)[:, None, None], turned, 0))
        self.write_kv(key, value, cache, slot_mapping)

    @abstractmethod
    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Causal attention of `query` ([num_tokens, num_heads, head_size]) over the cached keys of each row's request, into `out`
        (same shape). This step's `write_kv` or `rotate_and_write` has run before. Row t of request i has position
        seq_lens[i] - query_len(i) + t."""

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
        """`rotate_and_write` and `forward`, or with `out_scale` `forward_quantised`, in one kernel, without the rotated queries in memory.
        False: nothing was done, because the backend has no such kernel for this batch. Ours is for decodes of one token, and begins earlier
        where the metadata is `settled`. A subclass that overrides one of those three answers anew, or it is not asked."""
        return False

    def joins_rotation(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `rotate_and_attend` does its work for decodes of such queries there. Then piecewise graphs that serve decodes leave the
        rotation to it; where this is False they hold it, and it costs the host nothing."""
        return False

    def forward_given_keys(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """`forward`, given the keys and values of this step as `write_kv` got them ([num_tokens, num_kv_heads, head_size]).

        Where `metadata.only_first_chunks` holds, they are all the keys there are, and a backend may read them instead of the cache."""
        self.forward(query, cache, out, metadata)

    def forward_quantised(
        self,
        query: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor,
        scale: torch.Tensor,
        metadata: AttentionMetadata,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`forward`, or with keys and values `given` `forward_given_keys`, whose result / `scale` ([1], float32) goes into `out`, e4m3 of
        the query's shape, clamped to 448. The result is rounded to the query's dtype before. This is what it means; a backend may do it
        with one kernel."""
        result = torch.empty_like(query)
        if given is None:
            self.forward(query, cache, result, metadata)
        else:
            self.forward_given_keys(query, *given, cache, result, metadata)
        out.copy_((result.float() / scale).clamp_(-448.0, 448.0))
