"""A backend that rotates and attends in one kernel, and every kernel of which is a launch that torch stands in for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rung.attention import AttentionBackend, AttentionMetadata, AttentionSpec, KVCache, Rotation
from rung.attention.backends.torch_reference import TorchReference
from tests.launch.fakes import launcher_of

launched: Counter[str] = Counter()  # launches by kernel, since somebody cleared it


class _Kernel:
    """What stands where Triton's kernel would."""

    def __init__(self, name: str, run: Callable[..., None]) -> None:
        self._name, self._run = name, run

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            launched[self._name] += 1
            self._run(*arguments)

        return run


def _rotate(reference: TorchReference, *arguments: Any) -> None:
    AttentionBackend.rotate_and_write(reference, *arguments)


def _attend(reference: TorchReference, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
    reference.forward(query, cache, out, metadata)


def _both(
    reference: TorchReference,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    cache: KVCache,
    out: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    rotated = torch.empty_like(query)
    _rotate(reference, query, key, value, rotation, rotated, cache, metadata.slot_mapping)
    _attend(reference, rotated, cache, out, metadata)


_NAMED = {"rotate": _rotate, "attend": _attend, "rotate and attend": _both}
ROTATE, ATTEND, BOTH = (launcher_of(_Kernel(name, run), name) for name, run in _NAMED.items())


class Joining(TorchReference):
    """Decodes in one kernel that reads lengths on the device, prompts and mixed batches in two that are given those of the host."""

    name: ClassVar[str] = "joining"
    joins: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec, *, batch_invariant: bool = False) -> None:
        super().__init__(spec, batch_invariant=batch_invariant)
        self.reference = TorchReference(spec)

    def joins_rotation(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self.joins

    def launch_key(
        self, query: torch.Tensor, key: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, *, fresh: bool
    ) -> Hashable | None:
        if metadata.max_query_len == 1:
            return "decodes"
        assert metadata.host is not None
        return tuple(metadata.host.query_start_loc.tolist()), tuple(metadata.host.seq_lens.tolist())

    def rotate_and_write(self, *arguments: Any) -> None:
        ROTATE.run((1, 1, 1), self.reference, *arguments)

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        ATTEND.run((1, 1, 1), self.reference, query, cache, out, metadata)

    def rotate_and_attend(self, *arguments: Any) -> bool:
        *given, cache, out, metadata, out_scale = arguments
        assert out_scale is None
        if metadata.max_query_len > 1 or metadata.slot_mapping.shape[0] != len(out):
            return False
        longest = metadata.block_table.shape[1] * cache.block_size
        BOTH.run((1, 1, 1), self.reference, *given, cache, out, replace(metadata, host=None, max_seq_len=longest))
        return True


class Apart(Joining):
    """Has the kernel, and says that it is for nothing here."""

    name: ClassVar[str] = "apart"
    joins: ClassVar[bool] = False
