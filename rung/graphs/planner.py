"""The capture sizes that serve recorded steps at the least expected cost: an exact dynamic programme.

A group of consecutive recorded sizes shares the capture size at its upper end. With costs that never fall with the capture size, moving a
capture size down to the largest recorded size that it serves makes nothing worse, so some best ladder consists of recorded sizes (and the
maximum, when it is asked for). For m distinct recorded sizes and at most K capture sizes the programme takes O(m^2) cost evaluations,
O(K m^2) time and O(m^2 + K m) memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rung.errors import LadderError
from rung.graphs.coverage import allowed_mode
from rung.graphs.descriptor import ConfiguredMode, GraphMode
from rung.graphs.ladder import Ladder
from rung.graphs.plan_budget import within_budget
from rung.graphs.planned import resolve_mode
from rung.graphs.step_cost import Costs, Sizes, StepCosts
from rung.graphs.trace import TraceRun

Histogram = Mapping[tuple[int, GraphMode], int]  # (tokens, mode that would run) -> steps
_TIE = 1e-9  # relative; less is the rounding of sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a ladder does to a histogram. Costs are in the units of the curves, for one step on average."""

    sizes: tuple[int, ...]
    mean_cost: float
    waste: float  # share of padding among the rows that run in graphs
    steps_without_graph: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderPlan:
    """The best ladder, and the bytes that it needs when there is a budget."""

    outcome: Outcome
    size_bytes: int | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.outcome.sizes


def histogram(runs: Iterable[TraceRun]) -> Histogram:
    """Recorded steps by tokens and by the mode that their configuration allows. Runs without graphs count as full and piecewise ones;
    kinds of batches for which no graph is planned are left out."""
    steps: Counter[tuple[int, GraphMode]] = Counter()
    for run in runs:
        asked = run.header.graphs
        off = asked is ConfiguredMode.NONE
        resolved = resolve_mode(ConfiguredMode.FULL_AND_PIECEWISE) if off else resolve_mode(asked, run.header.capture_support)
        for step in run.steps:
            mode = allowed_mode(step.shape, resolved)
            if step.shape.num_tokens and mode is not GraphMode.NONE:
                steps[step.shape.num_tokens, mode] += step.count
    return steps


def evaluate(steps: Histogram, costs: StepCosts, ladder: Ladder) -> Outcome:
    """What `ladder` does to the recorded steps."""
    cost, rows, padded_rows, without = 0.0, 0, 0, 0
    for (tokens, mode), count in steps.items():
        one, size = np.array([tokens], np.int64), ladder.pad_to(tokens)
        if size is None:
            cost += count * float(costs.without_graph(one)[0])
            without += count
            continue
        cost += count * float(costs.of(one, mode, size)[0])
        if costs.in_graph(one, mode, size)[0]:
            rows += count * tokens
            padded_rows += count * int(costs.padded(one, mode, size)[0])
        else:
            without += count
    total = sum(steps.values())
    return Outcome(
        sizes=ladder.sizes,
        mean_cost=cost / total if total else 0.0,
        waste=1 - rows / padded_rows if padded_rows else 0.0,
        steps_without_graph=without,
        steps=total,
    )


def plan_ladder(
    steps: Histogram,
    costs: StepCosts,
    count: int,
    *,
    limit: int | None = None,
    maximum: int | None = None,
    memory: int | None = None,
    size_bytes: Callable[[int], int] | None = None,
) -> LadderPlan:
    """At most `count` sizes of the least expected cost, the fewest among equals.

    The top is `maximum` when given, else the largest recorded size, `limit` at most; it is always among the sizes, and steps above it run
    without a graph. With `memory`, the sizes need at most so many bytes together, `size_bytes(size)` each: when all sizes need the same
    this only lowers `count`, otherwise see `within_budget`. Raises `LadderError` when no step can be served, or not even the top fits."""
    if count < 1:
        raise LadderError(f"{count} sizes were asked for, expected at least 1", hint="give the number of graphs that you can afford")
    served = _served(steps, maximum if maximum is not None else limit)
    sizes = sorted({tokens for tokens, _ in served} | ({maximum} if maximum is not None else set()))
    if not served:
        raise LadderError("the trace has no step that a graph could serve", hint="record steps with tokens, or raise the maximum")
    needed = None if memory is None or size_bytes is None else [size_bytes(size) for size in sizes]
    table = group_costs(served, costs, sizes)
    if needed is None or memory is None:
        chosen = cheapest(table, count)
    else:
        if needed[-1] > memory:
            raise LadderError(f"size {sizes[-1]} needs {needed[-1]} bytes, the budget is {memory}", hint="raise --memory, or lower --max")
        chosen = _affordable(table, count, needed, memory)
    ladder = Ladder(tuple(sizes[index] for index in chosen))
    spent = None if needed is None else sum(needed[index] for index in chosen)
    return LadderPlan(outcome=evaluate(steps, costs, ladder), size_bytes=spent)


def group_costs(steps: Histogram, costs: StepCosts, sizes: Sequence[int]) -> Costs:
    """[m, m]: entry (i, j) is the cost of all steps of sizes[i] to sizes[j] in the capture size sizes[j], for i <= j."""
    tokens: Sizes = np.array(sizes, np.int64)
    counts = {mode: np.array([steps.get((size, mode), 0) for size in sizes], np.float64) for mode in {mode for _, mode in steps}}
    table = np.zeros((len(sizes), len(sizes)))
    for j, size in enumerate(sizes):
        each = sum((weight[: j + 1] * costs.of(tokens[: j + 1], mode, size) for mode, weight in counts.items()), np.zeros(j + 1))
        table[: j + 1, j] = np.cumsum(each[::-1])[::-1]
    return table


def cheapest(table: Costs, count: int) -> list[int]:
    """Indices of at most `count` groups' ends, the last index among them, of the least total; the fewest among equals."""
    m = len(table)
    best = table[0].copy()  # best[j]: cost of sizes 0..j when j is captured, with the k sizes of this round
    totals, parents = [best[-1]], []
    for _ in range(1, min(count, m)):
        parent = np.zeros(m, np.int64)
        following = np.full(m, np.inf)
        for j in range(1, m):
            through = best[:j] + table[1 : j + 1, j]
            parent[j] = through.argmin()
            following[j] = through[parent[j]]
        best = following
        totals.append(best[-1])
        parents.append(parent)
    least = min(totals)
    used = next(k for k, total in enumerate(totals) if total <= least + _TIE * abs(least))
    chosen = [m - 1]
    for parent in reversed(parents[:used]):
        chosen.append(int(parent[chosen[-1]]))
    return chosen[::-1]


def _affordable(table: Costs, count: int, needed: Sequence[int], memory: int) -> list[int]:
    """`cheapest` within a budget that holds at least the last size."""
    if needed[-1] and len(set(needed)) == 1:
        return cheapest(table, min(count, memory // needed[-1]))
    found = wanted = cheapest(table, count)
    while sum(needed[index] for index in found) > memory:
        found = cheapest(table, len(found) // 2)  # the last size alone fits
    if found is wanted:
        return found
    return within_budget(table, count, needed, memory, bound=total_cost(table, found))


def total_cost(table: Costs, chosen: Sequence[int]) -> float:
    """The cost of all steps when the groups end at `chosen`."""
    starts = [0, *(index + 1 for index in chosen[:-1])]
    return float(sum(table[start, end] for start, end in zip(starts, chosen, strict=True)))


def _served(steps: Histogram, top: int | None) -> dict[tuple[int, GraphMode], int]:
    return {key: count for key, count in steps.items() if top is None or key[0] <= top}
