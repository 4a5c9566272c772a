"""Attention breaks of a piecewise replay, as the launches of an earlier step.

A break's Python decides every step anew which kernels run with which numbers, and mostly decides the same. So a step's launches are written
down under what decided them (`LaunchKeys`), and a step with equal keys enqueues them and runs none of that Python.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rung.attention import AttentionCall, LaunchKeys
from rung.context import find_forward_context
from rung.counters import Count, Counters
from rung.launch import LaunchRecord, Workspace, record_launches
from rung.torch_compat import TorchDispatchMode

Run = Callable[[], None]
Runs = Sequence[Run]
Change = Callable[[Runs], Runs]  # wraps what a replay calls, for tools

_KEPT = 16  # keys of a program; the launches of 32 layers are about 20 KB on the host


class BreakReason(StrEnum):
    """Why an attention break of a replay ran its Python, counted as `python_break.<reason>`. The first run under a key has no reason; it
    counts as `recorded_breaks`, and later ones as `repeated_breaks`."""

    BACKEND = "backend"
    OTHER_WORK = "other_work"

    @property
    def counter(self) -> str:
        return f"python_break.{self}"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    BreakReason.BACKEND: "the attention backend's work for such a batch is not launches of ours alone",
    BreakReason.OTHER_WORK: "an operation ran beside the launches",
}


class BreakRepeats:
    """What the programs of one manager share: the counters, and the memory that repeated launches hand to each other."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.memory = Workspace()


class ProgramRepeats:
    """The records of one program. `runs` are its actions in order, `attention` the calls among them by index. Not thread-safe: the
    manager's lock covers it."""

    def __init__(self, runs: Runs, attention: Mapping[int, AttentionCall], shared: BreakRepeats) -> None:
        self._runs = tuple(runs)
        self._places = tuple(attention)
        self._calls = tuple(attention.values())
        self._shared = shared
        self._keys: LaunchKeys | None = None
        self._steps: OrderedDict[Hashable, _Step] = OrderedDict()

    def replay(self, change: Change) -> None:
        """Enqueue all actions. What is written down was wrapped by the `change` of then: see `forget`."""
        context = find_forward_context()
        keys = self._keys
        if context is not None and (keys is None or not keys.still_hold(context)):
            self._steps.clear()
            keys = self._keys = LaunchKeys.of(self._calls, context)
        if context is None or keys is None:
            _run(change(self._runs))  # a break without what it needs says so
            return
        now = keys.now(context)
        step = self._steps.get(now)
        if step is None:
            self._record(keys, now, change)
            return
        self._steps.move_to_end(now)
        for run in step.runs:
            run()
        for name, count in step.counts:
            self._shared.counters.add(name, count)

    def forget(self) -> None:
        """Drop the records: actions are wrapped in another way from now on."""
        self._steps.clear()

    def _record(self, keys: LaunchKeys, now: tuple[Hashable | None, ...], change: Change) -> None:
        """Run the step's Python, and write down what it launches."""
        wanted = [self._places[index] for group, key in zip(keys.groups, now, strict=True) if key is not None for index in group]
        records: dict[int, LaunchRecord] = {}
        runs = list(self._runs)
        with _OnlyLaunches() as looking:
            for place in wanted:
                runs[place] = _recording(runs[place], place, records, self._shared.memory, looking)
            _run(change(runs))
        good = {place: record.repeat() for place, record in records.items() if record.why_not is None}
        others = [
            (BreakReason.BACKEND.counter, len(self._places) - len(wanted)),
            (BreakReason.OTHER_WORK.counter, len(wanted) - len(good)),
        ]
        repeated = change([good.get(place, run) for place, run in enumerate(self._runs)])
        self._steps[now] = _Step(repeated, [(Count.REPEATED_BREAKS, len(good)), *others])
        if len(self._steps) > _KEPT:
            self._steps.popitem(last=False)
        for name, count in [(Count.RECORDED_BREAKS, len(good)), *others]:
            if count:
                self._shared.counters.add(name, count)


class _Step:
    """What a replay calls under one key, and what is counted behind it."""

    __slots__ = ("counts", "runs")

    def __init__(self, runs: Runs, counts: Sequence[tuple[str, int]]) -> None:
        self.runs = tuple(runs)
        self.counts = [(name, count) for name, count in counts if count]


def _run(runs: Runs) -> None:
    for run in runs:
        run()


def _recording(run: Run, place: int, records: dict[int, LaunchRecord], memory: Workspace, looking: _OnlyLaunches) -> Run:
    def recorded() -> None:
        with record_launches(memory) as record:
            looking.record = record
            try:
                run()
            finally:
                looking.record = None
        records[place] = record

    return recorded


class _OnlyLaunches(TorchDispatchMode):
    """Looks for work that a repetition of the launches in `record` would leave out. One for all breaks of a step: entering costs 5 us."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record: LaunchRecord | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.record is not None and not getattr(func, "is_view", False):
            self.record.refuse(f"{func} ran beside the launches")
        return func(*args, **(kwargs or {}))


def break_lines(counts: Mapping[str, int]) -> list[str]:
    """One line for each way in which attention breaks of piecewise replays ran, among all counts."""
    ways = [
        (Count.REPEATED_BREAKS, "as the launches of an earlier step"),
        (Count.RECORDED_BREAKS, "in Python, their launches written down for steps alike"),
        *((reason.counter, f"in Python: {reason.sentence}") for reason in BreakReason),
    ]
    return [f"{counts[name]} attention breaks ran {how}" for name, how in ways if counts.get(name, 0)]
