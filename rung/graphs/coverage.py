"""How a recorded run fared: steps in the best mode, the others by reason, sizes hit, rows padded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rung.graphs.descriptor import GraphMode, Shape
from rung.graphs.dispatch import Dispatcher
from rung.graphs.ladder import Ladder
from rung.graphs.planned import ResolvedMode, plan_descriptors, resolve_mode
from rung.graphs.reasons import Reason
from rung.graphs.trace import TracedStep, TraceHeader, TraceRun


@dataclass(slots=True)
class Coverage:
    """Counts over steps that had tokens. A step is covered when it ran in the best mode that its configuration allows for such a batch."""

    steps: int = 0
    covered: int = 0
    others: Counter[tuple[GraphMode, Reason]] = field(default_factory=Counter)  # steps that were not covered
    hits: Counter[int] = field(default_factory=Counter)  # steps in a graph by padded size
    rows: int = 0  # tokens of the steps in a graph, without padding
    padded_rows: int = 0  # and with it

    @property
    def share(self) -> float:
        return self.covered / self.steps if self.steps else 1.0

    @property
    def waste(self) -> float:
        """The share of padding among the rows that ran in graphs."""
        return 1 - self.rows / self.padded_rows if self.padded_rows else 0.0

    def add(self, step: TracedStep, resolved: ResolvedMode) -> None:
        if step.shape.num_tokens == 0:
            return
        self.steps += step.count
        if step.mode.rank >= allowed_mode(step.shape, resolved).rank:
            self.covered += step.count
        else:
            self.others[step.mode, step.reason] += step.count
        if step.mode is not GraphMode.NONE:
            self.hits[step.padded] += step.count
            self.rows += step.shape.num_tokens * step.count
            self.padded_rows += step.padded * step.count


def measure_coverage(runs: Iterable[TraceRun]) -> Coverage:
    """The coverage of all runs together, each by its own configuration."""
    coverage = Coverage()
    for run in runs:
        resolved = resolved_mode(run.header)
        for step in run.steps:
            coverage.add(step, resolved)
    return coverage


def replay(run: TraceRun, header: TraceHeader) -> TraceRun:
    """The same steps as they would run under another configuration."""
    ladder = Ladder.custom(header.ladder)
    planned = plan_descriptors(ladder, header.graphs, max_num_requests=header.max_num_requests, capture_support=header.capture_support)
    dispatcher = Dispatcher(planned, resolved=resolved_mode(header), max_waste=header.max_waste)
    return TraceRun(header=header, steps=tuple(_again(step, dispatcher) for step in run.steps))


def resolved_mode(header: TraceHeader) -> ResolvedMode:
    """The modes that the recorded configuration allows."""
    return resolve_mode(header.graphs, header.capture_support)


def allowed_mode(shape: Shape, resolved: ResolvedMode) -> GraphMode:
    """The best mode for such a batch; only single-token decodes count as uniform."""
    return resolved.decode if shape.uniform_query_len == 1 else resolved.mixed


def _again(step: TracedStep, dispatcher: Dispatcher) -> TracedStep:
    choice = dispatcher.dispatch(step.shape)
    return replace(step, mode=choice.descriptor.mode, padded=choice.descriptor.num_tokens, reason=choice.reason)
