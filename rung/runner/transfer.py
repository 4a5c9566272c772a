"""Copies from host to device that never wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from rung.counters import Count, Counters
from rung.runner.pinned import pinned_pool


class HostToDevice:
    """Every copy from host to device that a step makes goes through here and is counted.

    On CUDA each copy gets its own pinned staging: the host caching allocator hands a block out again only after the copy that reads it is
    done, so two steps in flight never share one."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self._pinned = pinned_pool(device)

    @contextmanager
    def readable(self, source: npt.NDArray[np.uint8]) -> Iterator[torch.Tensor]:
        """`source` for work that is enqueued inside, on the device: mapped pinned memory where there is such a thing, else a copy."""
        if self._pinned is None:
            yield self.to_device(source)
        else:
            with self._pinned.lend(source) as mapped:
                yield mapped

    def copy_into(self, source: npt.NDArray[np.generic], out: torch.Tensor) -> None:
        """Enqueue a copy of `source` into `out` (same shape and dtype)."""
        out.copy_(self._stage(source), non_blocking=True)
        self.counters.add(Count.HOST_TO_DEVICE_COPIES)

    def to_device(self, source: npt.NDArray[np.generic]) -> torch.Tensor:
        """Enqueue a copy of `source` into a fresh tensor, which never shares memory with `source`."""
        self.counters.add(Count.HOST_TO_DEVICE_COPIES)
        staged = self._stage(source)
        return staged.clone() if self.device.type == "cpu" else staged.to(self.device, non_blocking=True)

    def _stage(self, source: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(source)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor
