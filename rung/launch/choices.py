"""Which configuration of a generated kernel runs, where its compiler left several to choose from."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rung.cache import Manifest, Store, key_of
from rung.counters import Count, Counters
from rung.errors import ArtifactError, CacheError
from rung.launch.alignment import aligned_copy
from rung.launch.program import ProgramKernel

KIND = "choices"
_LAUNCHES, _ROUNDS = 10, 3

Run = Callable[..., None]  # (*arguments, stream)


class Chooser(Protocol):
    """Decides once a kernel and device."""

    def known(self, kernel: ProgramKernel) -> int | None:
        """The configuration that was chosen before, None when nobody did."""
        ...

    def measure(self, kernel: ProgramKernel, configs: Sequence[Run], arguments: Sequence[Any]) -> int | None:
        """The configuration to keep, None when none can be chosen now; the first then serves this call."""
        ...


class FirstConfig:
    """Takes what the compiler would have tried first."""

    def known(self, kernel: ProgramKernel) -> int | None:
        return 0

    def measure(self, kernel: ProgramKernel, configs: Sequence[Run], arguments: Sequence[Any]) -> int | None:
        return 0


class MeasuredChoices:
    """Measures at the first call outside a capture and keeps the choice in the store, so that every later process, and everybody who is
    given the entry, runs the same machine code."""

    def __init__(self, store: Store, device_name: str, counters: Counters) -> None:
        self.store, self.device_name, self.counters = store, device_name, counters

    def known(self, kernel: ProgramKernel) -> int | None:
        try:
            found = self.store.get(KIND, key_of(_factors(_codes(kernel), self.device_name)))
        except ArtifactError as error:
            warnings.warn(f"a stored choice could not be used and is made again: {error.message}", RuntimeWarning, stacklevel=2)
            return None
        codes = _codes(kernel)
        return codes.index(found.data["code"]) if found is not None and found.data.get("code") in codes else None

    def measure(self, kernel: ProgramKernel, configs: Sequence[Run], arguments: Sequence[Any]) -> int | None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None
        seconds = [_seconds(run, _own(kernel, arguments)) for run in configs]
        chosen = min(range(len(seconds)), key=seconds.__getitem__)
        self.counters.add(Count.KERNEL_TUNINGS)
        microseconds = [round(1e6 * one, 3) for one in seconds]
        with contextlib.suppress(CacheError):  # a store that cannot be written costs the next process this measurement
            self.store.put(choice_entry(_codes(kernel), self.device_name, kernel.configs[chosen].code, microseconds))
        return chosen


def choice_entry(codes: Sequence[str], device_name: str, code: str, microseconds: Sequence[float]) -> Manifest:
    """The entry of a store that says which of `codes` runs on devices of that name."""
    factors = _factors(codes, device_name)
    return Manifest(kind=KIND, key=key_of(factors), factors=factors, data={"code": code, "microseconds": list(microseconds)})


def _factors(codes: Sequence[str], device_name: str) -> dict[str, object]:
    return {"codes": list(codes), "device": device_name}


def _codes(kernel: ProgramKernel) -> list[str]:
    return [config.code for config in kernel.configs]


def _own(kernel: ProgramKernel, arguments: Sequence[Any]) -> list[Any]:
    """The arguments with copies of what the kernel updates in place."""
    return [aligned_copy(value) if name in kernel.written else value for name, value in zip(kernel.takes, arguments, strict=True)]


def _seconds(run: Run, arguments: Sequence[Any]) -> float:
    """Of one launch on the current stream, the least of some rounds."""
    import torch

    stream = torch.cuda.current_stream()
    run(*arguments, stream=stream.cuda_stream)
    found = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for _ in range(_LAUNCHES):
            run(*arguments, stream=stream.cuda_stream)
        end.record(stream)
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / _LAUNCHES)
    return float(min(found))
