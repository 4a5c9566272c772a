"""Which descriptors are worth their memory: trimming a list to a budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rung.errors import ConfigError
from rung.graphs.descriptor import Descriptor, GraphMode, Shape
from rung.graphs.dispatch import Dispatcher
from rung.graphs.ladder import DEFAULT_MAX_WASTE
from rung.graphs.memory import Kind, MemoryModel
from rung.graphs.step_cost import MODELLED_MICROSECONDS
from rung.graphs.trace import TraceRun

Steps = Mapping[Shape, float]  # how often each kind of step comes, in any unit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """`limit_bytes` for pool and executables together. `steps` is what the graphs are for, None: `default_steps`."""

    limit_bytes: int
    steps: Steps | None = None
    max_waste: float | None = DEFAULT_MAX_WASTE

    def __post_init__(self) -> None:
        if self.limit_bytes < 0:
            raise ConfigError(f"graph_memory_bytes must be at least 0, got {self.limit_bytes}", hint="leave it out for no limit")


def traced_steps(runs: Iterable[TraceRun]) -> dict[Shape, float]:
    """The steps of a trace by shape."""
    counts: Counter[Shape] = Counter()
    for run in runs:
        for step in run.steps:
            counts[step.shape] += step.count
    return {shape: float(count) for shape, count in counts.items() if shape.num_tokens}


def default_steps(descriptors: Sequence[Descriptor]) -> dict[Shape, float]:
    """Without a trace: of each kind, half of the steps at its largest size (a server under load), the other half spread over its sizes so
    that each doubling counts alike. The top is thus kept longest, then sizes that stand far apart, the small ones first."""
    steps: dict[Shape, float] = {}
    for kind in {Kind.of(one) for one in descriptors}:
        members = sorted((one for one in descriptors if Kind.of(one) == kind), key=lambda one: one.volume)
        spread = math.log2(2 * members[-1].volume)
        before = 0.5
        for member in members:
            share = math.log2(member.volume / before) / spread if member.volume > before else 0.0
            steps[_filling(member)] = steps.get(_filling(member), 0.0) + 0.5 * share + 0.5 * (member is members[-1])
            before = member.volume
    return steps


def trim(descriptors: Sequence[Descriptor], model: MemoryModel, budget: MemoryBudget) -> tuple[Descriptor, ...]:
    """Those of `descriptors` to leave out, the least valuable first, so that the prediction for the rest fits the budget.

    One after the other goes the descriptor whose loss costs least time for each byte that it frees: its steps then run in the next
    descriptor that the dispatcher would take, with the modelled times of `step_cost`."""
    auction = _Auction(descriptors, model, budget)
    while auction.kept and model.predict(auction.kept).total_bytes > budget.limit_bytes:
        auction.drop_cheapest()
    return tuple(auction.dropped)


@dataclass(slots=True)
class _Step:
    shape: Shape
    weight: float
    server: Descriptor = field(init=False)
    substitute: Descriptor = field(init=False)
    loss: float = 0.0  # microseconds a step when the server goes


class _Auction:
    def __init__(self, descriptors: Sequence[Descriptor], model: MemoryModel, budget: MemoryBudget) -> None:
        self.kept = list(descriptors)
        self.dropped: list[Descriptor] = []
        self._gone: set[Descriptor] = set()
        self._model = model
        self._dispatcher = Dispatcher(descriptors, failed=self._gone, max_waste=budget.max_waste)
        self._bytes = {one: model.executable_bytes(one) for one in descriptors}
        steps = budget.steps or default_steps(descriptors)
        self._steps = [_Step(shape, weight) for shape, weight in steps.items()]
        for step in self._steps:
            self._place(step)

    def drop_cheapest(self) -> None:
        losses = dict.fromkeys(self.kept, 0.0)
        for step in self._steps:
            if step.server in losses:
                losses[step.server] += step.weight * step.loss
        pool = self._model.pool_bytes(self.kept)
        tops = {Kind.of(one): one.volume for one in sorted(self.kept, key=lambda one: one.volume)}

        def price(one: Descriptor) -> tuple[float, int]:
            freed = self._bytes[one]
            if not self._model.shared_pool or one.volume == tops[Kind.of(one)]:  # below the top a shared pool stays as it is
                freed += pool - self._model.pool_bytes(other for other in self.kept if other is not one)
            return losses[one] / max(freed, 1), -one.volume

        worst = min(self.kept, key=price)
        self.kept.remove(worst)
        self.dropped.append(worst)
        self._gone.add(worst)
        for step in self._steps:
            if worst in (step.server, step.substitute):
                self._place(step)

    def _place(self, step: _Step) -> None:
        """Who serves the step, who would without that one, and what the difference costs."""
        step.server = self._dispatcher.dispatch(step.shape).descriptor
        if step.server.mode is GraphMode.NONE:
            step.substitute, step.loss = step.server, 0.0
            return
        self._gone.add(step.server)
        step.substitute = self._dispatcher.dispatch(step.shape).descriptor
        self._gone.discard(step.server)
        step.loss = _cost(step.substitute) - _cost(step.server)


def _cost(descriptor: Descriptor) -> float:
    fixed, per_row = MODELLED_MICROSECONDS[descriptor.mode]
    return fixed + per_row * descriptor.volume


def _filling(descriptor: Descriptor) -> Shape:
    """The step that fills `descriptor`."""
    return Shape(
        num_tokens=descriptor.num_tokens,
        num_requests=descriptor.num_requests,
        uniform_query_len=descriptor.uniform_query_len,
        max_query_len=descriptor.max_query_len or descriptor.num_tokens,
        adapters=descriptor.adapters,
        variant=descriptor.variant,
        symbols=descriptor.symbols,
    )
