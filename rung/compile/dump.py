"""RUNG_DUMP=<folder>: what a compile saw and made, one sub-folder a trace. A dump that fails warns and never stops a run."""

from __future__ import annotations

import dis
import itertools
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from rung import config, torch_compat
from rung.compile.compiled import CompiledFunction
from rung.compile.generated import Source
from rung.compile.pieces import Piece
from rung.compile.plan import CompilePlan
from rung.compile.trace import TracedGraph


@dataclass(frozen=True, slots=True)
class Dump:
    """Writes into `folder`, or nothing when it is None."""

    folder: Path | None

    @staticmethod
    def of(entry: str, plan_key: str) -> Dump:
        """A folder that no other trace has, `Net.forward-1a2b3c4d`, then `Net.forward-1a2b3c4d.2`."""
        root = config.variable("RUNG_DUMP")
        if not root:
            return Dump(None)
        name = re.sub(r"[^A-Za-z0-9_.]+", "_", entry.rpartition(":")[2])
        first = Path(root) / f"{name}-{plan_key[:8]}"
        try:
            return Dump(
                next(p for n in itertools.count(1) if not (p := first if n == 1 else first.with_name(f"{first.name}.{n}")).exists())
            )
        except OSError as error:
            warnings.warn(f"RUNG_DUMP could not write {first.name}: {error}", RuntimeWarning, stacklevel=2)
            return Dump(None)

    def traced(self, traced: TracedGraph) -> None:
        self._write("captured_graph.py", lambda: torch_compat.readable(traced.graph_module))
        self._write("bytecode.py", lambda: _decompile(traced.bytecode))

    def piece(self, index: int, piece: Piece) -> None:
        self._write(f"piece_{index:02}.py", lambda: f"# key {piece.key}\n{torch_compat.readable(piece.graph_module)}")

    def graph_passes(self, index: int) -> Callable[[int, str, fx.Graph], None] | None:
        """An observer for `PassManager`: the piece as the passes get it, and behind each pass that changed it."""
        if self.folder is None:
            return None
        texts: list[str] = []

        def observe(number: int, name: str, graph: fx.Graph) -> None:
            try:
                text = str(graph)
            except Exception as error:
                text = f"# the graph cannot be shown: {error}"
            if text not in texts[-1:]:
                texts.append(text)
                self._write(f"piece_{index:02}.pass_{number:02}_{name}.txt", lambda: text)

        return observe

    def entry(self, source: Source, guards: Source) -> None:
        self._write("entry.py", source.text)
        self._write("guards.py", guards.text)

    def loaded(self, plan: CompilePlan, compiled: CompiledFunction) -> None:
        self._write("plan.json", lambda: json.dumps(plan.to_json(), indent=1))
        self._write("stitched.py", compiled.source.text)
        self._write("guards.txt", lambda: "".join(f"{one.kind:10} {one.name}  {one.value}\n" for one in plan.guards.guards))
        for index, source in enumerate(compiled.piece_sources):
            self._write(f"inductor_{index:02}.py", source.__str__)

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(self._text(text))
        except Exception as error:
            warnings.warn(f"RUNG_DUMP could not write {name}: {error}", RuntimeWarning, stacklevel=2)

    @staticmethod
    def _text(make: Callable[[], str]) -> str:
        return make()


def _decompile(code: Any) -> str:
    if code is None:
        return "# traced by torch.compile, which keeps the bytecode to itself\n"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # depyf 0.20 and astor name nodes of `ast` that Python 3.12 and later warn of
        try:
            from depyf import decompile
        except ImportError:
            return "# install rung[debug] to see Dynamo's bytecode decompiled\n"
        try:
            return str(decompile(code))
        except Exception as error:  # depyf 0.20 knows no bytecode of Python 3.13
            return f"# depyf cannot decompile it: {type(error).__name__}\n{dis.Bytecode(code).dis()}"
