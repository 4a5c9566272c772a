"""The custom pass that Inductor runs: the configured passes in order, then lowering. One that always runs comes before it.

Inductor calls it on a cache miss only, so its report is stored with the artifact and never relied on as a side effect.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from rung import torch_compat
from rung.passes import ir, lowering
from rung.passes.cleanup.keep_apart import KeepApart
from rung.passes.cleanup.kept_copies import KeepCopies
from rung.passes.fused_ops import FUSED_OPS
from rung.passes.ir import IR_OPS
from rung.passes.providers import OwnProvider
from rung.passes.report import NearMiss, PassOutcome


class GraphPass(Protocol):
    """A rewrite of one piece after AOTAutograd. `uuid` covers its source and parameters."""

    name: str

    def uuid(self) -> str: ...

    def run(self, graph: fx.Graph) -> Mapping[str, int] | PassOutcome:
        """Rewrite `graph` in place and return what was matched how often."""
        ...


Observer = Callable[[int, str, fx.Graph], None]  # position, name of the pass that has just run, its graph


class PassManager:
    """Runs passes over a piece and remembers what they did to it. `late` passes run behind lowering, on what Inductor will see."""

    def __init__(
        self,
        passes: Sequence[GraphPass] = (),
        late: Sequence[GraphPass] = (),
        observe: Observer | None = None,
        *,
        providers: Sequence[OwnProvider] = (),
    ) -> None:
        self.passes = tuple(passes)
        self.late = tuple(late)
        self.providers = tuple(providers)
        self._observe = observe or (lambda number, name, graph: None)
        self.report: dict[str, Any] = {}
        self.near_misses: list[NearMiss] = []

    def fresh(self, observe: Observer | None = None) -> PassManager:
        """The same passes, for another piece. `observe` sees the graph before them and behind each."""
        return PassManager(self.passes, self.late, observe, providers=self.providers)

    def uuid(self, tag: str = "") -> str:
        """Identity of everything this manager may do to a graph; `tag` separates pieces that Inductor's own key does not."""
        sources = [inspect.getsource(lowering), *(inspect.getsource(inspect.getmodule(op.body) or ir) for op in (*IR_OPS, *FUSED_OPS))]
        parts = [tag, *sources, *(f"{item.name}:{item.uuid()}" for item in self.passes), "late"]
        parts += [KeepCopies().uuid(), KeepApart().uuid(), *(item.uuid() for item in self.providers)]
        return hashlib.sha256("\0".join([*parts, *(f"{item.name}:{item.uuid()}" for item in self.late)]).encode()).hexdigest()

    def check(self) -> None:
        """Let every pass and provider that can prove itself do so, before a piece is changed. Raises `PassError`."""
        for item in (*self.passes, *self.late, *self.providers):
            check = getattr(item, "check", None)
            if check is not None:
                check()

    def run(self, graph: fx.Graph) -> None:
        self.near_misses = []
        numbers = itertools.count(1)
        self._observe(0, "before", graph)
        report: dict[str, Any] = {item.name: self._run(item, graph, next(numbers)) for item in self.passes}
        if self.providers:
            outcome = lowering.lower_to(graph, self.providers)
            self.near_misses += outcome.near_misses
            report["providers"] = dict(outcome.matches)
        report["lowering"] = lowering.lower(graph, (*IR_OPS, *FUSED_OPS))
        self._observe(next(numbers), "lowering", graph)
        self.report = report | {item.name: self._run(item, graph, next(numbers)) for item in self.late}

    def _run(self, item: GraphPass, graph: fx.Graph, number: int) -> dict[str, int]:
        outcome = item.run(graph)
        self._observe(number, item.name, graph)
        if isinstance(outcome, PassOutcome):
            self.near_misses += outcome.near_misses
            return dict(outcome.matches)
        return dict(outcome)

    def as_json(self) -> dict[str, Any]:
        """The report that is kept with the artifact: counts by pass, and near misses where there are any."""
        missed = [miss.as_json() for miss in self.near_misses]
        return self.report | ({"near_misses": missed} if missed else {})

    def inductor_options(self, tag: str = "", *, stop: bool = False) -> dict[str, Any]:
        """Inductor settings that install this manager. With `stop` no cache of Inductor's serves the piece, and `StopCompile` is raised
        once the passes have run."""

        def run_and_stop(graph: fx.Graph) -> None:
            self.run(graph)
            raise torch_compat.StopCompile

        identity = uuid.uuid4().bytes if stop else self.uuid(tag).encode()
        return {
            torch_compat.EARLY_OPTION: torch_compat.graph_pass(_before_rewrites, (KeepCopies().uuid() + KeepApart().uuid()).encode()),
            torch_compat.PASS_OPTION: torch_compat.graph_pass(run_and_stop if stop else self.run, identity),
            torch_compat.LATE_OPTION: torch_compat.graph_pass(_behind_rewrites, KeepApart().uuid().encode()),
        }


def _before_rewrites(graph: fx.Graph) -> None:
    KeepApart().note(graph)
    KeepCopies().run(graph)


def _behind_rewrites(graph: fx.Graph) -> None:
    KeepApart().run(graph)
