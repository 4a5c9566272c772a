"""The one custom pass that Inductor runs: the configured passes in order, then lowering.

Inductor calls it on a cache miss only, so its report is stored with the artifact and never relied on as a side effect.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from torch import fx

from rung import torch_compat
from rung.passes import ir, lowering


class GraphPass(Protocol):
    """A rewrite of one piece after AOTAutograd. `uuid` covers its source and parameters."""

    name: str

    def uuid(self) -> str: ...

    def run(self, graph: fx.Graph) -> dict[str, int]:
        """Rewrite `graph` in place and return what was matched how often."""
        ...


class PassManager:
    """Runs passes over a piece and remembers what they did to it."""

    def __init__(self, passes: Sequence[GraphPass] = ()) -> None:
        self.passes = tuple(passes)
        self.report: dict[str, dict[str, int]] = {}

    def uuid(self, tag: str = "") -> str:
        """Identity of everything this manager may do to a graph; `tag` separates pieces that Inductor's own key does not."""
        sources = [inspect.getsource(lowering), *(inspect.getsource(inspect.getmodule(op.body) or ir) for op in ir.IR_OPS)]
        parts = [tag, *sources, *(f"{item.name}:{item.uuid()}" for item in self.passes)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def run(self, graph: fx.Graph) -> None:
        report = {item.name: item.run(graph) for item in self.passes}
        self.report = report | {"lowering": lowering.lower(graph)}

    def inductor_options(self, tag: str = "") -> dict[str, Any]:
        """Inductor settings that install this manager."""
        return {torch_compat.PASS_OPTION: torch_compat.graph_pass(self.run, self.uuid(tag).encode())}
