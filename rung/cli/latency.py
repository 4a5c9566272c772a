"""Times of a step in several modes: medians over interleaved rounds and several input sets, each after a warm-up."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Calls of the CUDA runtime and driver that put work on the device, each one launch for the host.
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cuGraphLaunch")


class Step(ABC):
    """One step in one mode on one set of inputs, repeatable."""

    @abstractmethod
    def start(self) -> Callable[[], object]:
        """Enqueue the step; the result waits until its results are on the host (or on the device, when nobody reads them)."""

    @abstractmethod
    def ran(self) -> str:
        """How the last step really ran, with the reason when it was not the best mode."""


@dataclass(slots=True)
class Timing:
    """Samples of one mode at one size, in seconds; device figures are empty without a GPU."""

    step: list[float] = field(default_factory=list)  # from the start to the result
    host: list[float] = field(default_factory=list)  # until everything was enqueued
    device: list[float] = field(default_factory=list)  # between events around the step
    ran: Counter[str] = field(default_factory=Counter)
    busy: float | None = None  # sum over the kernels of one step
    launches: int | None = None  # of one step, by the host
    kernels: int | None = None  # of one step, on the device

    def as_json(self) -> dict[str, Any]:
        """Medians in ms, None where a GPU is needed."""
        return {
            "step_ms": _median_ms(self.step),
            "host_ms": _median_ms(self.host),
            "device_ms": _median_ms(self.device),
            "busy_ms": None if self.busy is None else self.busy * 1e3,
            "launches": self.launches,
            "kernels": self.kernels,
            "ran": dict(self.ran),
            "samples": len(self.step),
        }


def measure(input_sets: Iterable[Mapping[str, Step]], device: torch.device, *, repeats: int, warmup: int = 3) -> dict[str, Timing]:
    """`input_sets` yields, one set after the other, a step for each mode. In every round each mode runs once, in an order that rotates."""
    timings: dict[str, Timing] = {}
    for number, steps in enumerate(input_sets):
        modes = list(steps)
        for mode in modes:
            for _ in range(warmup if number == 0 else 1):
                steps[mode].start()()
        for turn in range(repeats):
            for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                _sample(steps[mode], timings.setdefault(mode, Timing()), device)
        if number == 0 and device.type == "cuda":
            for mode in modes:
                _profile(steps[mode], timings[mode])
    return timings


def _sample(step: Step, timing: Timing, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start = time.perf_counter()
    if on_gpu:
        first.record()
    finish = step.start()
    if on_gpu:
        last.record()
    enqueued = time.perf_counter()
    finish()
    done = time.perf_counter()
    timing.ran[step.ran()] += 1
    timing.step.append(done - start)
    timing.host.append(enqueued - start)
    if on_gpu:
        last.synchronize()
        timing.device.append(first.elapsed_time(last) * 1e-3)


def _profile(step: Step, timing: Timing) -> None:
    """Count the launches and kernels of one step, and add up the kernels' times."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        step.start()()
        torch.cuda.synchronize()
    events = recorded.events() or []
    timing.launches = sum(event.name in _LAUNCHES for event in events)
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))]
    timing.kernels = len(kernels)
    timing.busy = sum(event.time_range.elapsed_us() for event in kernels) * 1e-6


def _median_ms(seconds: list[float]) -> float | None:
    return statistics.median(seconds) * 1e3 if seconds else None
