"""Where the host's time of a step goes, by function: own timers around the calls of one engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rung.graphs.program import ReplayProgram
from rung.launch import TritonLauncher
from rung.runner import AsyncOutput, Engine, ModelRunner
from rung.runner import model_runner as model_runner_module

WAIT = "wait for the device"
GRAPHS = "graph launches"
PIECES = "launches of large pieces"
BREAKS = "breaks, beside the launchers below"
_ACTIONS = {"graph": GRAPHS, "launches": PIECES, "break": BREAKS}  # by kind
REST = "engine, the rest"


class HostProfile:
    """Exclusive microseconds of named parts of a step; they add up to the whole. A timed call costs 0.4 us, which its caller is charged.
    Means over the fastest quarter of the steps, so that what else the machine does stays out.

    Methods of one engine, its scheduler and its runner are replaced while `recording`, and for the whole process what the runner takes
    from its module: one recording at a time."""

    def __init__(self, engine: Engine, runner: ModelRunner) -> None:
        self._parts_of_steps: list[dict[str, float]] = []  # seconds
        self._step: dict[str, float] = {}
        self._engine = engine
        self._runner = runner
        self._launchers = _attention_launchers()
        self._children = [0.0]  # seconds of the timed calls inside of each open one

    def table(self) -> list[tuple[str, float]]:
        """(part, microseconds a step), in the order of a step; the last row is the host's sum, without the wait."""
        steps = sorted(self._parts_of_steps, key=lambda step: sum(step.values()))
        steps = steps[: max(1, len(steps) // 4)]
        names = list(dict.fromkeys(name for name, _, _ in self._parts()))
        rows = [(name, sum(step.get(name, 0.0) for step in steps) / len(steps) * 1e6) for name in names]
        return [*rows, ("host, sum", sum(us for name, us in rows if name != WAIT))]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Time every step of the engine inside."""
        undo = [self._replace(name, owner, attribute) for name, owner, attributes in self._parts() for attribute in attributes]
        undo += [self._replace_actions(program) for program in self._programs()]
        try:
            yield
        finally:
            for restore in reversed(undo):
                restore()

    def _parts(self) -> Sequence[tuple[str, Any, tuple[str, ...]]]:
        engine, runner, scheduler = self._engine, self._runner, self._engine.scheduler
        manager = getattr(runner.forward, "manager", None)
        return (
            ("schedule", scheduler, ("schedule",)),
            ("check the plan", runner._checker, ("check",)),
            ("apply the plan, staged writes", model_runner_module, ("apply_plan",)),
            ("batch", runner._batches, ("repeated", "build")),
            ("dispatch", runner.forward, ("dispatch",)),
            ("inputs", runner._step, ("prepare",)),
            ("upload", runner._inputs, ("upload", "upload_decodes")),
            ("kernels of ids, positions, lengths", runner._inputs, ("build",)),
            *(("block tables, slot mapping", table, ("gather_rows", "map_slots")) for table in runner.block_tables),
            ("forward, the rest", runner.forward, ("advance", "run")),
            ("graph manager, the rest", manager, ("run",)),
            ("address sweep", getattr(manager, "_guard", None), ("sweep",)),
            (GRAPHS, None, ()),
            (PIECES, None, ()),
            (BREAKS, None, ()),
            *((f"  launch {launcher.name}", launcher, ("run",)) for launcher in self._launchers),
            ("logits outside of a graph", runner._step, ("_logits",)),
            ("sampling outside of a graph", runner, ("_sample",)),
            ("advance outside of a graph", runner, ("_advance",)),
            ("sampling by a decode graph's kernels", runner.decode, ("sample",)),
            ("start of the tokens' copy", model_runner_module, ("AsyncOutput",)),
            ("runner, the rest", runner, ("execute_model", "sample_tokens")),
            (WAIT, AsyncOutput, ("_wait",)),
            ("tokens to Python", AsyncOutput, ("get_output",)),
            ("tokens to the scheduler", scheduler, ("update",)),
            ("text, stops, updates", engine, ("_take",)),
            (REST, engine, ("step",)),
        )

    def _replace(self, name: str, owner: Any, attribute: str) -> Callable[[], None]:
        if not hasattr(owner, attribute):
            return lambda: None
        original, own = getattr(owner, attribute), attribute in vars(owner)
        setattr(owner, attribute, self._timed(name, original, is_step=name == REST))
        return (lambda: setattr(owner, attribute, original)) if own else (lambda: delattr(owner, attribute))

    def _programs(self) -> list[ReplayProgram]:
        manager = getattr(self._runner.forward, "manager", None)
        return [] if manager is None else [manager.program(descriptor) for descriptor in manager.captured]

    def _replace_actions(self, program: ReplayProgram) -> Callable[[], None]:
        """Time what a replay calls, unless it is wrapped as a whole already."""
        names = [_ACTIONS[action.kind] for action in program.actions]

        def timed(runs: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
            return [self._timed(name, run, is_step=False) for name, run in zip(names, runs, strict=len(runs) > 1)]

        return program.wrap(timed)

    def _timed(self, name: str, call: Callable[..., Any], *, is_step: bool) -> Callable[..., Any]:
        clock, children, step = time.perf_counter, self._children, self._step

        def timed(*args: Any, **kwargs: Any) -> Any:
            children.append(0.0)
            start = clock()
            try:
                return call(*args, **kwargs)
            finally:
                total = clock() - start
                step[name] = step.get(name, 0.0) + total - children.pop()
                children[-1] += total
                if is_step:
                    self._parts_of_steps.append(dict(step))
                    step.clear()

        return timed


def _attention_launchers() -> list[TritonLauncher]:
    """Those of all attention kernels of ours, once each, by name."""
    modules = [module for name, module in sys.modules.items() if name.startswith("rung.attention")]
    found = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, TritonLauncher)}
    return sorted(found.values(), key=lambda launcher: launcher.name)


def show(title: str, columns: Sequence[tuple[str, HostProfile]]) -> None:
    """One table: a row for each part, a column for each profile."""
    tables = [dict(profile.table()) for _, profile in columns]
    print(f"{title:40}" + "".join(f"{name:>12}" for name, _ in columns))
    for part in tables[0]:
        print(f"{part:40}" + "".join(f"{table[part]:12.1f}" for table in tables))
