"""What ran on the device during a call, from the profiler. Imports nothing of ours, so that each peer can use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel. Times count from the first kernel of the trace."""

    name: str
    start_us: float
    us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def kernels_of(call: Callable[[], object], *, copies: bool = False) -> list[Kernel]:
    """All kernels of a call, those of replayed graphs included, by their starts; with `copies` also copies and fills by the driver.

    Reads what the profiler recorded as it is: torch's `events()` builds a tree of objects of it before, which takes many times as long."""
    import torch
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        call()
        torch.cuda.synchronize()
    results = recorded.profiler.kineto_results
    if results is None:
        return []
    found = [
        (event.start_ns(), event.duration_ns(), event.name())
        for event in results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    found = sorted(one for one in found if copies or not one[2].startswith(("Memcpy", "Memset")))
    return [Kernel(name, (start - found[0][0]) * 1e-3, duration * 1e-3) for start, duration, name in found]
