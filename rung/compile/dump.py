"""RUNG_DUMP=<folder>: what a compile saw and made, one sub-folder a function. A dump that fails warns and never stops a run."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung import config, torch_compat
from rung.compile.compiled import CompiledFunction
from rung.compile.pieces import Piece
from rung.compile.plan import CompilePlan
from rung.compile.trace import TracedGraph


@dataclass(frozen=True, slots=True)
class Dump:
    """Writes into `folder`, or nothing when it is None."""

    folder: Path | None

    @staticmethod
    def of(entry: str, plan_key: str) -> Dump:
        root = config.variable("RUNG_DUMP")
        name = re.sub(r"[^A-Za-z0-9_.]+", "_", entry.rpartition(":")[2])
        return Dump(Path(root) / f"{name}-{plan_key[:8]}" if root else None)

    def traced(self, traced: TracedGraph) -> None:
        self._write("captured_graph.py", lambda: torch_compat.readable(traced.graph_module))
        self._write("bytecode.py", lambda: _decompile(traced.bytecode))

    def piece(self, index: int, piece: Piece) -> None:
        self._write(f"piece_{index:02}.py", lambda: f"# key {piece.key}\n{torch_compat.readable(piece.graph_module)}")

    def loaded(self, plan: CompilePlan, compiled: CompiledFunction) -> None:
        self._write("plan.json", lambda: json.dumps(plan.to_json(), indent=1))
        self._write("stitched.py", compiled.source.text)
        for index, source in enumerate(compiled.piece_sources):
            self._write(f"inductor_{index:02}.py", source.__str__)

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text())
        except Exception as error:
            warnings.warn(f"RUNG_DUMP could not write {name}: {error}", RuntimeWarning, stacklevel=2)


def _decompile(code: Any) -> str:
    if code is None:
        return "# traced by torch.compile, which keeps the bytecode to itself\n"
    try:
        from depyf import decompile
    except ImportError:
        return "# install rung[debug] to see Dynamo's bytecode decompiled\n"
    return str(decompile(code))
