"""Code of their own for single sizes and ranges of a function's dynamic dimension, beside the code for all sizes, which is always there.

The graph is that of the one trace; its unique pieces are compiled again with the size fixed or bounded. In the background a thread does it
while the code for all sizes serves. An artifact is published whole, when all pieces of its sizes are loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rung import torch_compat
from rung.cache import Factors
from rung.compile.artifact import Sources
from rung.compile.build import SplitGraph
from rung.compile.compiled import CompiledFunction
from rung.compile.dump import Dump
from rung.compile.load import load_pieces
from rung.compile.piece_compiler import MISS_HINT, PieceCompiler, StoredPiece
from rung.compile.report import CompileReport
from rung.compile.selfcheck import cases_of, check_pieces
from rung.compile.sizes import SizeRange
from rung.compile.trace import TracedGraph
from rung.counters import Count, Counters
from rung.errors import CacheMissError, ConfigError

_log = logging.getLogger(__name__)
Source = tuple[SplitGraph, TracedGraph]


@dataclass(slots=True)
class VariantState:
    """How it stands with one of the sizes or ranges."""

    sizes: SizeRange
    state: str = "waiting"  # "compiling", "compiled", "loaded", "failed"
    seconds: float = 0.0  # that compiling it took, now or when it was stored
    error: BaseException | None = field(default=None, repr=False)


class SizeVariants:
    """The variants of one compiled function. `source` gives its split graph: kept from its compile, or traced again."""

    def __init__(
        self,
        compiled: CompiledFunction,
        ranges: Sequence[SizeRange],
        pieces: PieceCompiler,
        code: Factors,
        owner: Mapping[str, Any],
        counters: Counters,
    ) -> None:
        names = sorted({extent for _, spec in compiled.plan.tensors for extent in spec.shape if isinstance(extent, str)})
        if len(names) != 1:
            raise ConfigError(
                f"variants are for one dynamic dimension, and {compiled.plan.entry} has {len(names)}: {', '.join(names)}",
                hint="give dimensions that are equal one name in `dynamic`, or leave out `variants`",
            )
        self.compiled = compiled
        self.states = {sizes: VariantState(sizes) for sizes in dict.fromkeys(ranges)}
        self._pieces, self._code, self._owner, self._counters = pieces, code, owner, counters
        self._thread: threading.Thread | None = None

    def start(self, source: Callable[[], Source], *, background: bool) -> None:
        """Load what the store has, and compile the rest: now, or in a thread. Raises `CompileError` now, or in `wait`."""
        for sizes, state in self.states.items():
            report = CompileReport()
            blobs = [self._pieces.stored(key, self._code, sizes, report) for key, _ in self.compiled.plan.pieces]
            found = [blob for blob in blobs if blob is not None]
            if len(found) == len(blobs):
                self._publish(sizes, found)
                state.state, state.seconds = "loaded", report.piece_seconds
        missing = [state for state in self.states.values() if state.state == "waiting"]
        if not missing:
            return
        if self._pieces.store.require_hit:
            names = ", ".join(str(state.sizes) for state in missing)
            raise CacheMissError(f"code for sizes {names} of {self.compiled.plan.entry} would have to be compiled", hint=MISS_HINT)
        made = source()
        if background:
            device = self.compiled.device
            # No daemon: the interpreter would take its modules away under the compiler, which aborts the process.
            self._thread = threading.Thread(target=self._build_behind, args=(missing, made, device), name="rung-variants", daemon=False)
            self._thread.start()
        else:
            for state in missing:
                self._build(state, made)
            made[0].forget()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the thread; whether it is done. Raises the error of the first variant that failed."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        for state in self.states.values():
            if state.error is not None:
                raise state.error
        return True

    def as_json(self) -> list[dict[str, Any]]:
        calls = self.compiled.calls_by_size()
        return [
            {
                "sizes": str(state.sizes),
                "state": state.state,
                "seconds": state.seconds,
                "calls": calls.get(state.sizes, 0),
                "error": str(state.error or ""),
            }
            for state in self.states.values()
        ]

    def _build_behind(self, missing: Sequence[VariantState], source: Source, device: torch.device) -> None:
        """In the thread. What fails is counted, logged, and raised by `wait`; the code for all sizes serves these too. A process that ends
        waits for the variant at hand, and the next process compiles the others."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        for state in missing:
            if _process_ends():
                break
            try:
                self._build(state, source)
            except Exception as error:
                if _process_ends():  # its thread pools take no work any more: that says nothing about the variant
                    state.state = "waiting"
                    break
                state.state, state.error = "failed", error
                self._counters.add(Count.VARIANT_FAILURES)
                _log.error("no code of its own for sizes %s of %s: %s", state.sizes, self.compiled.plan.entry, error)
        source[0].forget()

    def _build(self, state: VariantState, source: Source) -> None:
        graph, traced = source
        state.state = "compiling"
        start = time.perf_counter()
        report = CompileReport()
        with torch.no_grad():
            blobs = [
                self._pieces.blob(index, piece, traced, self._code, report, Dump(None), state.sizes)
                for index, piece in enumerate(graph.pieces)
            ]
            ends = tuple(dict.fromkeys((state.sizes.low, min(state.sizes.high, state.sizes.low + 2))))
            cases = cases_of(graph, self.compiled.plan, blobs, self._owner)
            check_pieces(cases, report, self._counters, self.compiled.device, self._pieces, ends)
            for found in blobs:
                self._pieces.confirm(found)
        self._publish(state.sizes, blobs)
        state.state, state.seconds = "compiled", time.perf_counter() - start
        self._counters.add(Count.SIZE_VARIANTS)

    def _publish(self, sizes: SizeRange, blobs: Sequence[StoredPiece]) -> None:
        data = {digest: found for blob in blobs for digest, found in blob.blobs.items()}
        artifacts = [blob.artifact for blob in blobs]
        with torch_compat.quiet_compiler():
            loaded = load_pieces(artifacts, data.__getitem__, self.compiled.device, self._pieces.store, self._counters)
        self.compiled.publish(sizes, loaded, self._owner, Sources(artifacts, data.__getitem__))


def _process_ends() -> bool:
    """Whether the main thread is done, and the interpreter waits for the others."""
    return not threading.main_thread().is_alive()
