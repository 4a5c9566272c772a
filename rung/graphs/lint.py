"""What is wrong with a list of capture sizes, from the configuration alone and from recorded steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rung.graphs.coverage import Coverage, measure_coverage, resolved_mode
from rung.graphs.descriptor import GraphMode
from rung.graphs.ladder import DEFAULT_MAX_WASTE, Ladder, too_wasteful
from rung.graphs.trace import TraceHeader, TraceRun

WANTED_COVERAGE = 0.99  # share of steps in the best mode
COMMON = 0.01  # share of steps from which a recorded size counts as common


class Rule(StrEnum):
    """What is checked."""

    EMPTY = "empty"
    DUPLICATE = "duplicate"
    ABOVE_MAXIMUM = "above_maximum"
    LARGEST_NOT_CAPTURED = "largest_not_captured"
    STEPS_ABOVE_TOP = "steps_above_top"
    WASTE = "waste"
    COVERAGE = "coverage"
    NEVER_HIT = "never_hit"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. A problem should be mended; a note is good to know."""

    rule: Rule
    is_problem: bool
    message: str
    advice: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """`coverage` is None without a trace."""

    sizes: tuple[int, ...]
    findings: tuple[Finding, ...]
    coverage: Coverage | None = None

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_problem)


def lint(sizes: Sequence[int], setup: TraceHeader, runs: Sequence[TraceRun] = ()) -> LintReport:
    """Check `sizes`, in any order and with duplicates, under the limits of `setup` (whose own ladder is not looked at), and what `runs`
    show. Raises `LadderError` for a size that is no positive integer."""
    ladder = Ladder.custom(sizes)
    coverage = measure_coverage(runs) if runs else None
    findings = [*_check_list(sizes, setup), *_check_top(ladder, setup), *_check_waste(ladder, setup, _common_sizes(runs))]
    if coverage is not None:
        findings += [*_check_coverage(coverage), *_check_hits(ladder, coverage)]
    return LintReport(tuple(sizes), tuple(findings), coverage)


def _check_list(sizes: Sequence[int], setup: TraceHeader) -> Iterator[Finding]:
    if not sizes and setup.graphs.decode is not GraphMode.NONE:
        yield Finding(Rule.EMPTY, True, "no size is captured, so no step runs in a graph", "capture sizes, or switch graphs off")
    twice = sorted(size for size, times in Counter(sizes).items() if times > 1)
    if twice:
        yield Finding(Rule.DUPLICATE, True, f"sizes given more than once: {_list(twice)}", "give each size once")
    if setup.max_num_tokens is not None:
        above = sorted({size for size in sizes if size > setup.max_num_tokens})
        if above:
            message = f"no step has more than {setup.max_num_tokens} tokens, so these sizes are above the maximum: {_list(above)}"
            yield Finding(Rule.ABOVE_MAXIMUM, True, message, "drop them, or raise max_num_tokens")


def _check_top(ladder: Ladder, setup: TraceHeader) -> Iterator[Finding]:
    if not ladder:
        return
    resolved = resolved_mode(setup)
    largest = min((n for n in (setup.max_num_requests, setup.max_num_tokens) if n is not None), default=0)
    if resolved.decode is not GraphMode.NONE and setup.max_num_requests is not None and ladder.top < largest:
        message = f"decode batches of {ladder.top + 1} to {largest} requests can be scheduled, and the largest size is {ladder.top}"
        yield Finding(Rule.LARGEST_NOT_CAPTURED, True, message, f"add {largest}, or lower max_num_requests")
    if resolved.mixed is not GraphMode.NONE and setup.max_num_tokens is not None and ladder.top < setup.max_num_tokens:
        message = f"steps of {ladder.top + 1} to {setup.max_num_tokens} tokens (prompts) run without a graph"
        advice = "usual, as large steps hide their launches; a trace shows how many there are, and long_prefill_chunk makes them smaller"
        yield Finding(Rule.STEPS_ABOVE_TOP, False, message, advice)


def _check_waste(ladder: Ladder, setup: TraceHeader, recorded: Iterable[int]) -> Iterator[Finding]:
    cap = setup.max_waste or DEFAULT_MAX_WASTE
    requests = setup.max_num_requests or 0
    wasteful = []
    for size in sorted({*range(1, min(requests, ladder.top) + 1), *recorded}):
        padded = ladder.pad_to(size)
        # A full decode graph of all requests is captured when any size reaches that far.
        if padded is not None and too_wasteful(size, min(padded, requests) if size <= requests else padded, cap):
            wasteful.append(size)
    if wasteful:
        consequence = "nothing stops it" if setup.max_waste is None else "therefore run without a graph"
        message = f"steps of {_ranges(wasteful)} tokens would be padded to more than {cap:g} times their size, and {consequence}"
        yield Finding(Rule.WASTE, True, message, "add sizes in between: " + _list(_between(ladder, wasteful)))


def _check_coverage(coverage: Coverage) -> Iterator[Finding]:
    if coverage.share < WANTED_COVERAGE:
        (mode, reason), count = coverage.others.most_common(1)[0]
        message = f"{coverage.share:.1%} of {coverage.steps} steps ran in the best mode, expected {WANTED_COVERAGE:.0%}"
        most = f"most of the others ({count}) ran in mode {mode}: {reason.sentence}"
        yield Finding(Rule.COVERAGE, True, f"{message}; {most}", reason.advice)


def _check_hits(ladder: Ladder, coverage: Coverage) -> Iterator[Finding]:
    never = [size for size in ladder if not coverage.hits[size]]
    if never:
        message = f"{len(never)} of {len(ladder)} sizes were never hit: {_ranges_among(never, ladder.sizes)}"
        yield Finding(Rule.NEVER_HIT, False, message, "rung ladder plan --trace FILE --sizes K chooses sizes for this traffic")


def _common_sizes(runs: Iterable[TraceRun]) -> list[int]:
    """Recorded step sizes that make up at least `COMMON` of all steps."""
    counts: Counter[int] = Counter()
    for run in runs:
        for step in run.steps:
            counts[step.shape.num_tokens] += step.count
    return [size for size, count in counts.items() if size and count >= COMMON * counts.total()]


def _between(ladder: Ladder, wasteful: Sequence[int]) -> list[int]:
    """A size for each gap of the ladder in which steps are wasteful: the largest such step."""
    largest = {ladder.pad_to(size): size for size in sorted(wasteful)}
    return sorted(largest.values())


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(str(size) for size in sizes)


def _ranges(sizes: Sequence[int]) -> str:
    return _ranges_among(sizes, range(sizes[0], sizes[-1] + 1))


def _ranges_among(sizes: Sequence[int], every: Sequence[int]) -> str:
    """Sizes as ranges `a..b`, where neighbours are neighbours in `every`."""
    place = {size: index for index, size in enumerate(every)}
    groups: list[list[int]] = []
    for size in sizes:
        if groups and place[size] == place[groups[-1][-1]] + 1:
            groups[-1].append(size)
        else:
            groups.append([size])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}..{group[-1]}" for group in groups)
