"""Work on other streams than the one that is captured (CUDA)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from rung.torch_compat import occupy_stream

_CYCLES = 20_000_000  # about 10 ms: longer than the host needs to look at an event


class SideStreams:
    """Sees operations that run on another stream than the one current at `begin`.

    Joins leave no trace that Python could read, so a dry run tries them out: the side stream is kept busy for a while before each
    operation, and an own stream that finishes first has not waited for it. Inside a capture a stream is wrong when it is not captured."""

    def __init__(self, device: torch.device, *, capturing: bool) -> None:
        self._device = device
        self._capturing = capturing
        self._own: torch.cuda.Stream | None = None
        self._seen: dict[torch.cuda.Stream, tuple[str, str]] = {}  # the last operation and its place

    def begin(self) -> None:
        self._own = torch.cuda.current_stream(self._device)
        self._seen.clear()

    def operation(self, name: str, where: Callable[[], str]) -> str:
        """An operation is about to run on the current stream. Says what is wrong with it, or an empty text."""
        current = torch.cuda.current_stream(self._device)
        if self._capturing:
            return "" if torch.cuda.is_current_stream_capturing() else "runs on a stream that is not captured: no replay would repeat it"
        if current != self._own:
            self._seen[current] = (name, where())
            occupy_stream(_CYCLES)
        return ""

    def unjoined(self) -> Iterator[tuple[str, str]]:
        """The last operation, and its place, of each side stream that the own one did not wait for."""
        assert self._own is not None
        for stream, operation in self._seen.items():
            occupied = stream.record_event()
            self._own.record_event().synchronize()
            time.sleep(0.001)  # an event that was waited for is seen a moment later
            if not occupied.query():
                yield operation
            occupied.synchronize()
