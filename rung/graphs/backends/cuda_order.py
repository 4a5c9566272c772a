"""Steps of one manager that come from several streams or from a thread with another current device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rung.graphs.backends.base import StepOrder
from rung.torch_compat import raw_stream_calls

_HERE: AbstractContextManager[Any] = nullcontext()


class CudaStepOrder(StepOrder):
    """Compares raw stream handles, so that a step on the stream of the last one costs one comparison."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._current_device, self._current_stream = raw_stream_calls()
        self._raw: int | None = None
        self._last: torch.cuda.Stream | None = None

    def step(self) -> AbstractContextManager[Any]:
        raw = self._current_stream(self._index)
        if raw != self._raw:
            current = torch.cuda.current_stream(self._index)
            if self._last is not None:
                current.wait_stream(self._last)
            self._raw, self._last = raw, current
        return _HERE if self._current_device() == self._index else torch.cuda.device(self._index)
