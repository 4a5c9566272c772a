"""What a compile tells about itself: its report, and the clock that fills in the phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CompileReport:
    """What one compile did and how long each phase took."""

    plan_key: str = ""
    source: str = ""  # "compiled" or "loaded"
    reason: str = ""  # why it was not loaded
    retraced: str = ""  # what an earlier trace had read and was changed, which made this one necessary
    seconds: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    unique_pieces: int = 0
    passes: list[dict[str, Any]] = field(default_factory=list)  # one a unique piece

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the block's time to a phase, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
