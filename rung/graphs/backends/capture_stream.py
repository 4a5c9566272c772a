"""The stream that captures of a device run on."""

from __future__ import annotations

import functools
import threading

import torch


class CaptureStream:
    """One side stream a device for all managers: torch keeps a cuBLAS workspace (32 MiB on Hopper) for every stream that was ever used. The
    lock keeps captures of two threads apart."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.lock = threading.RLock()


@functools.cache
def _of_ordinal(ordinal: int) -> CaptureStream:
    return CaptureStream(torch.device("cuda", ordinal))


def capture_stream(device: torch.device) -> CaptureStream:
    """The capture stream of `device`, the current one where it has no index."""
    return _of_ordinal(torch.cuda.current_device() if device.index is None else device.index)
