"""The step trace of a wrapped object: one file for all of its traces."""

from __future__ import annotations

import threading
from pathlib import Path

from rung.graphs.descriptor import ConfiguredMode, Shape
from rung.graphs.dispatch import Dispatch
from rung.graphs.trace import StepTrace, TraceHeader


class StepLog:
    """A `StepTrace` that several threads may add to. Building it raises `ConfigError` when the file cannot be written."""

    def __init__(self, path: str | Path, *, graphs: str, ladder: tuple[int, ...], maximum: int | None, max_waste: float | None) -> None:
        header = TraceHeader(graphs=ConfiguredMode(graphs), ladder=ladder, max_num_tokens=maximum, max_waste=max_waste)
        self._trace = StepTrace(path, header)
        self._lock = threading.Lock()

    def add(self, shape: Shape, dispatch: Dispatch) -> None:
        """Count one step."""
        with self._lock:
            self._trace.add(shape, dispatch.descriptor.mode, dispatch.descriptor.num_tokens, dispatch.reason)

    def flush(self) -> None:
        """Write everything that was added."""
        with self._lock:
            self._trace.flush()
