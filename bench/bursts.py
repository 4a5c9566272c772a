"""Host time of something that only enqueues."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def burst_us(call: Callable[[], object], *, burst: int, rounds: int) -> float:
    """Median us a call over bursts without synchronisation inside; the device is idle when a burst begins. Warmed up by one burst."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(burst):
            call()
        times.append((time.perf_counter() - start) / burst * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times[1:])
