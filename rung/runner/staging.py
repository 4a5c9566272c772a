"""Writes to device tensors, collected on the host and applied in one operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rung.runner.ops.base import StepOps
from rung.runner.transfer import HostToDevice

_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}
_INDEX_BYTES = 8


class StagedWrites:
    """Collects writes to the rows of `target` (contiguous, 2-D) and applies them as one scatter, whose kernel reads the pinned
    host memory they are packed in; where the platform does not allow that, one copy goes before it.

    A later write to the same element wins. `apply` clears what was staged, also when it fails: no later step pays for a write that
    cannot be made. Without staged writes it does nothing."""

    def __init__(self, target: torch.Tensor, transfer: HostToDevice, ops: StepOps) -> None:
        assert target.is_contiguous()
        assert target.dim() == 2
        self.target = target
        self._width = target.shape[1]
        self._transfer = transfer
        self._ops = ops
        self._dtype = _NUMPY[target.dtype]
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._values: list[float] = []  # of all writes, one behind the other

    def stage(self, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        """Write `values` to `target[row, start:]` at the next `apply`."""
        length = len(values)
        assert 0 <= start <= self._width - length
        self._starts.append(row * self._width + start)
        self._lengths.append(length)
        self._values += values

    def apply(self) -> None:
        """Enqueue all staged writes."""
        if not self._starts:
            return
        staged = self._starts, self._lengths, self._values
        self._starts, self._lengths, self._values = [], [], []
        index, contents = self._pack(*staged)
        if not index.size:
            return
        # One buffer, so that index and contents travel together; the index comes first to keep both aligned.
        packed = np.concatenate([index.view(np.uint8), contents.view(np.uint8)])
        split = index.size * _INDEX_BYTES
        with self._transfer.readable(packed) as parts:
            self._ops.scatter(self.target, parts[:split].view(torch.int64), parts[split:].view(self.target.dtype))

    def _pack(
        self, first: Sequence[int], counts: Sequence[int], values: Sequence[float]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.generic]]:
        """Flat positions in `target`, each at most once, and their values."""
        starts, lengths = np.array(first, np.int64), np.array(counts, np.int64)
        contents = np.array(values, self._dtype)
        ends = np.cumsum(lengths)
        index = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
        order = np.argsort(starts, kind="stable")
        if (starts[order][1:] >= (starts + lengths)[order][:-1]).all():
            return index, contents
        unique, last = np.unique(index[::-1], return_index=True)
        return unique, contents[::-1][last]
