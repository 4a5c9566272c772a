"""The current device and stream as raw numbers: torch's public calls build an object each time, several microseconds a launch."""

from __future__ import annotations

from collections.abc import Callable

import torch


def raw_stream_calls() -> tuple[Callable[[], int], Callable[[int], int]]:
    """(the current device's ordinal, the raw handle of a device's current stream). Needs a CUDA build of torch."""
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
