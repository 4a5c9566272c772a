"""What decides the launches of a step's attention, for all layers at once.

The launches of an attention call follow from the tensors it was captured with, its layer's cache and backend, and the step's metadata. The
first two stay while a graph lives; the third is looked at once a step for each set of layers that share it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rung.attention.base import AttentionBackend, AttentionMetadata, KVCache, answers_for
from rung.attention.layer import Attention
from rung.context import ForwardContext

_RUNS = ("forward", "forward_given_keys", "forward_quantised", "rotate_and_write", "rotate_and_attend")  # in a break


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of `rung::attention`, with the arguments of the op. Its break may hold the rotation in front of it too, whose tensors stay as
    those of the call do."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    layer: str
    written: torch.Tensor | None = None
    fresh: bool = False
    out_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Bound:
    """A layer as it was bound when its launches were first looked at."""

    name: str
    layer: Attention
    cache: KVCache
    backend: AttentionBackend
    answers: bool  # the backend, for what it runs itself


class LaunchKeys:
    """`groups` holds the indices of the calls that one key decides. Made in a step, for steps whose layers are bound as they are now."""

    def __init__(self, calls: Sequence[AttentionCall], bound: Sequence[_Bound], groups: Sequence[tuple[int, ...]]) -> None:
        self._calls = tuple(calls)
        self._bound = tuple(bound)
        self.groups = tuple(groups)

    @staticmethod
    def of(calls: Sequence[AttentionCall], context: ForwardContext) -> LaunchKeys | None:
        """None where a layer is not bound or has no metadata: the call says so itself."""
        bound: list[_Bound] = []
        groups: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            layer: Attention | None = context.attention_layers.get(call.layer)
            metadata: AttentionMetadata | None = context.attention_metadata.get(call.layer)
            if layer is None or metadata is None or layer.kv_cache is None or layer.backend is None:
                return None
            bound.append(_Bound(call.layer, layer, layer.kv_cache, layer.backend, answers_for(type(layer.backend), "launch_key", _RUNS)))
            kept = layer.kv_cache.key
            alike = (id(layer.backend), id(metadata), call.query.shape, call.query.dtype, call.key.shape, call.key.dtype)
            groups.setdefault((*alike, kept.shape[1:], kept.dtype, call.fresh, call.out_scale is None), []).append(index)
        return LaunchKeys(calls, bound, [tuple(group) for group in groups.values()])

    def still_hold(self, context: ForwardContext) -> bool:
        """Whether the layers are bound as they were, and share metadata as they did."""
        layers, metadata = context.attention_layers, context.attention_metadata
        for one in self._bound:
            layer = layers.get(one.name)
            if layer is not one.layer or layer.kv_cache is not one.cache or layer.backend is not one.backend:
                return False
        for group in self.groups:
            first = metadata.get(self._bound[group[0]].name)
            if first is None or any(metadata.get(self._bound[index].name) is not first for index in group):
                return False
        return True

    def now(self, context: ForwardContext) -> tuple[Hashable | None, ...]:
        """One key for each group; None where the backend's work is not launches of ours alone."""
        metadata = context.attention_metadata
        return tuple(self._key(self._calls[group[0]], self._bound[group[0]], metadata) for group in self.groups)

    @staticmethod
    def _key(call: AttentionCall, bound: _Bound, metadata_of: Mapping[str, Any]) -> Hashable | None:
        if not bound.answers:
            return None
        metadata: AttentionMetadata = metadata_of[bound.name]
        key = bound.backend.launch_key(call.query, call.key, bound.cache, metadata, fresh=call.fresh)
        if key is None:
            return None
        table = metadata.block_table
        return (
            key, metadata.num_requests, metadata.may_pad, metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(),
            table.data_ptr(), table.stride(), metadata.slot_mapping.data_ptr(), metadata.slot_mapping.shape[0], metadata.settled,
        )  # fmt: skip
