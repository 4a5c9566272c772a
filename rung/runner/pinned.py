"""Pinned host memory that kernels read and write in place, instead of a copy to or from the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rung import torch_compat

_LEAST_BYTES = 1 << 12


class PinnedPool:
    """Lends pinned buffers as the device sees them. One is lent again only when the work that was enqueued while it was lent is done, so
    the pool grows to what is in flight and allocates nothing after that.

    torch's own pinned allocator would not do: it knows of copies, not of kernels that read a block."""

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], mapped: Callable[[torch.Tensor], torch.Tensor], event: Callable[[], Any]
    ) -> None:
        self._allocate = allocate
        self._mapped = mapped
        self._make_event = event
        self._back: deque[_Buffer] = deque()  # the one whose last reader came first is the first

    @contextmanager
    def lend(self, source: npt.NDArray[np.uint8]) -> Iterator[torch.Tensor]:
        """`source` for work that is enqueued inside, on the current stream."""
        buffer = self._take(source.size)
        buffer.host[: source.size] = source
        try:
            yield buffer.mapped[: source.size]
        finally:  # also what failed may have enqueued a reader
            buffer.event.record()
            self._back.append(buffer)

    def _take(self, size: int) -> _Buffer:
        for index, buffer in enumerate(self._back):
            if buffer.host.size >= size and buffer.event.query():
                del self._back[index]
                return buffer
        memory = self._allocate(max(_LEAST_BYTES, 1 << (size - 1).bit_length()))
        return _Buffer(memory, self._mapped(memory), self._make_event())


class _Buffer:
    def __init__(self, memory: torch.Tensor, mapped: torch.Tensor, event: Any) -> None:
        self.host = memory.numpy()  # keeps the memory
        self.mapped = mapped
        self.event = event


class _CudaArray:
    """The interface by which torch takes memory at an address for the device's own; see Numba's documentation of it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {"shape": tuple(memory.shape), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 3}


def pinned_pool(device: torch.device) -> PinnedPool | None:
    """None where kernels cannot read pinned memory at the address that the host knows (no CUDA, no unified addressing)."""
    if device.type != "cuda":
        return None
    probe = _pinned(16)
    try:
        if _mapped(probe, device).data_ptr() != probe.data_ptr():
            return None
    except (RuntimeError, ValueError, TypeError):
        return None
    return PinnedPool(_pinned, partial(_mapped, device=device), torch.cuda.Event)


def shared_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, npt.NDArray[Any] | None]:
    """A tensor of zeros on `device`, and the same memory as the host sees it; None where the host cannot see it.

    Kernels write pinned memory in place; the host may read what they wrote once an event behind them is done."""
    if device.type == "cpu":
        tensor = torch.zeros(shape, dtype=dtype)
        return tensor, tensor.numpy()
    if pinned_pool(device) is None:
        return torch.zeros(shape, dtype=dtype, device=device), None
    memory = _pinned(math.prod(shape) * dtype.itemsize).zero_()
    if torch_compat.is_fake(memory):  # a rehearsal without memory
        return torch.zeros(shape, dtype=dtype, device=device), None
    seen = memory.view(dtype).view(shape).numpy()
    return _mapped(memory, device).view(dtype).view(shape), seen


def _mapped(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned bytes as the device sees them; keeps the memory."""
    return torch.as_tensor(_CudaArray(memory), device=device)


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
