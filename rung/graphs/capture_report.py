"""What captures cost."""

from __future__ import annotations

from dataclasses import dataclass

from rung.errors import CaptureError
from rung.graphs.descriptor import Descriptor


@dataclass(frozen=True, slots=True)
class CaptureEntry:
    """One descriptor's cost. `pool_bytes` is what the pool grew by, `launches` the graphs of one replay."""

    descriptor: Descriptor
    seconds: float
    pool_bytes: int
    launches: int


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What a call of `capture` did, in capture order."""

    entries: tuple[CaptureEntry, ...]
    failures: tuple[CaptureError, ...]
    seconds: float
    pool_bytes: int  # held by the pool now, over all captures so far
