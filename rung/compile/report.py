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
    title: str = ""  # what is compiled, for people
    dump: Any = None  # the `Dump` of this compile
    variants: Any = None  # the `SizeVariants` of this compile, None without any
    source: str = ""  # "compiled" or "loaded"
    kernels_built: bool = False  # whether the store has all images of our kernels that the comparison of the pieces takes
    reason: str = ""  # why it was not loaded
    retraced: str = ""  # what an earlier trace had read and was changed, which made this one necessary
    seconds: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    unique_pieces: int = 0
    hit_pieces: int = 0  # of the unique pieces of a compile, those that the store had
    piece_seconds: float = 0.0  # what compiling the unique pieces took, now or when they were stored
    saved_seconds: float = 0.0  # of compiling, because of the store
    passes: list[dict[str, Any]] = field(default_factory=list)  # one a unique piece
    whole_passes: dict[str, Any] = field(default_factory=dict)  # what passes over the whole graph did

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the block's time to a phase, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def add_piece(self, seconds: float, *, hit: bool) -> None:
        """Count a unique piece whose compile took `seconds`."""
        self.piece_seconds += seconds
        if hit:
            self.hit_pieces += 1
            self.saved_seconds += seconds

    def __str__(self) -> str:
        """What the store had, in words."""
        saved = f", {self.saved_seconds:.1f} s saved" if self.saved_seconds else ""
        why = f" ({self.reason})" if self.reason else ""
        part = f", {self.hit_pieces} of {self.unique_pieces} pieces from the store" if self.cache == "partial" else ""
        return f"{self.source}{part}{saved}{why}"

    @property
    def cache(self) -> str:
        """What the store had. "hit": nothing was traced or compiled; "partial": some pieces came from the store; "miss"."""
        return "hit" if self.source == "loaded" else "partial" if self.hit_pieces else "miss"
