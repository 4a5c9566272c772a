"""Launches written down while they run, and repeated later without the Python that made them.

For code that launches the same kernels with the same numbers at the same addresses step after step: what it costs the host is not the
launch (2 to 3 us) but what decides about it. Whoever repeats a record has to know that nothing else decides.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rung.counters import Count, Counters
from rung.torch_compat import no_dispatch_modes

if TYPE_CHECKING:
    import torch

    from rung.launch.driver import Driver
    from rung.launch.triton_launcher import Entry

# The record that launches of this context are written into.
current_record: ContextVar[LaunchRecord | None] = ContextVar("rung_launch_record", default=None)

Repeat = Callable[[], None]


class Workspace:
    """Memory that kernels of one break hand to each other, the same for all breaks that share this object: they run one after another on
    the device. It only grows, since records go on to write to what they were given."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._used = 0
        self._lent: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}  # by (place in the newest memory, shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(one.nbytes for one in self._memory)

    def begin(self) -> None:
        """A break begins: what the one before it was given is free."""
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor of undefined values, until the next `begin`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        wanted = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if not self._memory or self._used + wanted > self._memory[-1].nbytes:
            self._grow(wanted, device)
        place = (self._used, tuple(shape), dtype)
        self._used += wanted
        if place not in self._lent:
            with no_dispatch_modes():  # this is no work of the break's
                self._lent[place] = self._memory[-1][place[0] : place[0] + num_bytes].view(dtype).view(*shape)
        return self._lent[place]

    def _grow(self, num_bytes: int, device: torch.device) -> None:
        import torch

        twice = 2 * self._memory[-1].nbytes if self._memory else 0
        with no_dispatch_modes():
            self._memory.append(torch.empty(max(num_bytes, twice), dtype=torch.uint8, device=device))
        self._lent.clear()
        self._used = 0

    def release(self) -> None:
        """Give the memory back. Nobody repeats a record that was given some."""
        self._memory.clear()
        self._lent.clear()
        self._used = 0


_ALIGNMENT = 256


@functools.cache
def _writer(num_bytes: int) -> Callable[..., None]:
    """A function that copies so many bytes to the start of a buffer, given (buffer, 0, bytes)."""
    return struct.Struct(f"{num_bytes}s").pack_into


class LaunchRecord:
    """What launchers launched in this context while it was the current record. `why_not` says why it cannot be repeated, if so."""

    def __init__(self, memory: Workspace) -> None:
        memory.begin()
        self.memory = memory
        self.why_not: str | None = None
        self._bound: list[tuple[Any, ...]] = []
        self._called: list[Repeat] = []
        self._driver: Driver | None = None
        self._ordinal = -1

    def __len__(self) -> int:
        return len(self._bound) + len(self._called)

    def refuse(self, why: str) -> None:
        """Say that something ran that a repetition would leave out."""
        self.why_not = self.why_not or why

    def bound(self, entry: Entry, grid: tuple[int, int, int], ordinal: int, driver: Driver) -> None:
        """A launch on the current device; the parameters lie in the entry, whose lock the caller holds."""
        if self._called or (self._bound and ordinal != self._ordinal):
            self.refuse("launches on two devices, or by two launchers")
        data = bytes(entry.bytes)
        self._ordinal, self._driver = ordinal, driver
        self._bound.append((entry.lock, _writer(len(data)), entry.bytes, data, entry.launch, *grid))

    def called(self, run: Repeat) -> None:
        """A launch by a launcher that is not ours."""
        if self._bound:
            self.refuse("launches by two launchers")
        self._called.append(run)

    def repeat(self) -> Repeat:
        """A function that enqueues the launches again, on the device's stream that is current then."""
        if self._driver is None:
            return _in_order(tuple(self._called))
        launches, driver, ordinal = tuple(self._bound), self._driver, self._ordinal
        current_device, current_stream = driver.stream_calls()

        def enqueue() -> None:
            stream = current_stream(ordinal)
            for lock, pack_into, target, data, launch, x, y, z in launches:
                with lock:
                    pack_into(target, 0, data)
                    launch(x, y, z, stream)

        def run() -> None:
            if current_device() == ordinal:
                enqueue()
            else:
                with driver.device(ordinal):
                    enqueue()

        return run


class RepeatedLaunches:
    """Work that is launches alone and follows from a key: the first run of a key is as ever, later ones are its launches. Of many keys the
    last `kept` are. `run` must have no effect on the host. `counters` get how it ran: `repeated_inputs`, `recorded_inputs`, or
    `python_inputs` where what was written down cannot be repeated, for the last reason in `why_not`."""

    def __init__(self, kept: int, counters: Counters) -> None:
        self.why_not: str | None = None
        self._kept = kept
        self._counters = counters
        self._memory = Workspace()
        self._known: OrderedDict[Hashable, Repeat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def run(self, key: Hashable, run: Repeat) -> None:
        repeat = self._known.get(key)
        if repeat is not None:
            self._known.move_to_end(key)
            repeat()
            self._counters.add(Count.REPEATED_INPUTS)
            return
        with record_launches(self._memory) as record:
            run()
        self.why_not = record.why_not
        self._counters.add(Count.PYTHON_INPUTS if record.why_not else Count.RECORDED_INPUTS)
        if record.why_not is None:
            self._known[key] = record.repeat()
            if len(self._known) > self._kept:
                self._known.popitem(last=False)


def _in_order(runs: Sequence[Repeat]) -> Repeat:
    def run() -> None:
        for one in runs:
            one()

    return run


@contextmanager
def record_launches(memory: Workspace) -> Iterator[LaunchRecord]:
    """Launches of this context inside are launched and written down."""
    record = LaunchRecord(memory)
    token = current_record.set(record)
    try:
        yield record
    finally:
        current_record.reset(token)


def workspace(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that one kernel of a break writes for the next one: the allocator's, or what a record keeps for its repetitions."""
    record = current_record.get()
    if record is not None:
        return record.memory.take(shape, dtype, device)
    import torch

    return torch.empty(tuple(shape), dtype=dtype, device=device)


def run_recorded(run: Repeat) -> None:
    """Run a launch of another launcher, and write it down where somebody records."""
    record = current_record.get()
    if record is None:
        run()
        return
    with no_dispatch_modes():  # what Triton's interpreter does with the arguments is not the break's work
        run()
    record.called(run)
