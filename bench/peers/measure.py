"""What every peer measures in the same way, in a process of its own. Rows are written as they come, so that a time limit costs the rest."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import gc
import itertools
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.device_trace import kernels_of
from bench.peers.asked import HEAVY, Point, numbers, prefills, sweep_tokens
from bench.peers.shapes import HF_CONFIGS, prefill_operations

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]  # so many tokens for each prompt, greedy, past any end token, ids on the host


class Report:
    """Rows of one peer, in a file that is whole after each row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._begin, self._waited = time.perf_counter(), 0.0

    def add(self, kind: str, **values: Any) -> None:
        self.rows.append({"kind": kind, **values})
        whole = self.path.with_suffix(".new")
        whole.write_text(json.dumps(self.rows))
        whole.replace(self.path)
        print(kind, values, flush=True)

    def turn(self, asked: argparse.Namespace) -> None:
        """With `--wait`, until a line comes on stdin: imports are done, and the device, not touched so far, is measured on by another
        process. Ends this process where stdin ends, since then nobody would collect its rows."""
        start = time.perf_counter()
        if asked.wait and not sys.stdin.readline():
            sys.exit("stdin ended before this process had its turn")
        self._waited = time.perf_counter() - start

    def ready(self) -> None:
        """A row, and what the device holds: seconds from the begin of the report to here, without the wait for a turn."""
        self.add("phase", name="ready", seconds=time.perf_counter() - self._begin - self._waited)
        memory(self, "ready")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add("phase", name=name, seconds=time.perf_counter() - start)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """A failure becomes a row, and what follows is still measured."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add("failure", what=what, error=f"{type(error).__name__}: {error}"[:400])


class NoStepsError(RuntimeError):
    """Calls of an engine's `step` were not its steps."""


class Stamps:
    """When each step of an engine ended: its method `step` is replaced for this one object."""

    def __init__(self, engine: Any) -> None:
        self.times: list[float] = []
        original = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            self.times.append(time.perf_counter())
            return out

        engine.step = step


def prompts(count: int, length: int, model: str, draw: int = 0) -> Prompts:
    """The same ones for every peer."""
    rng = random.Random(f"{count} {length} {draw}")
    ids = range(10, HF_CONFIGS[model]["vocab_size"])
    return [rng.choices(ids, k=length) for _ in range(count)]


def steps(report: Report, generate: Generate, asked: argparse.Namespace, stamps: Stamps | None = None, chunk: int = 0) -> None:
    """A row for each batch size: ms a decode step between `--short` and `--long` tokens. With `stamps`, and `chunk` tokens of prompts in a
    step, from the times at which steps ended; else, and where calls of the engine were no steps, from the difference between a short and
    a long generation, which holds the noise of two prefills."""
    for batch in numbers(asked.batches):
        with report.guarded(f"steps of {batch} at {asked.context}"):
            report.add("step", **step(generate, asked, batch, stamps, chunk))


def step(generate: Generate, asked: argparse.Namespace, batch: int, stamps: Stamps | None = None, chunk: int = 0) -> dict[str, Any]:
    def seconds(tokens: int, draw: int) -> float:
        some = prompts(batch, asked.context, asked.model, draw)
        start = time.perf_counter()
        generate(some, tokens)
        return time.perf_counter() - start

    def stamped(stamps: Stamps, draw: int) -> float:
        stamps.times.clear()
        seconds(asked.long, draw)
        times = steady(stamps.times, asked.long, prefills(Point(batch, asked.context), chunk))[asked.short :]
        if len(times) < 2:
            raise NoStepsError(f"no steps of all requests between {asked.short} and {asked.long} tokens")
        return (times[-1] - times[0]) / (len(times) - 1)

    def difference(draw: int) -> float:
        first = seconds(asked.short, 2 * draw + 1)
        return (seconds(asked.long, 2 * draw + 2) - first) / (asked.long - asked.short)

    seconds(asked.short, 0)
    way, found = "difference", list[float]()
    if stamps is not None:
        with suppress(NoStepsError):
            found = [stamped(stamps, draw + 1) for draw in range(asked.rounds)]
            way = "stamps"
    found = [1e3 * each for each in found or [difference(draw) for draw in range(asked.rounds)]]
    return {"batch": batch, "context": asked.context, "by": way, **_spread(found)}


def kernels(report: Report, generate: Generate, asked: argparse.Namespace, patience: float = 40) -> None:
    """A row for each batch size: milliseconds of a decode step in which the device runs something, and how many kernels that are. Comes
    last: a profiler that takes longer than `patience` seconds for one ends the process, with its traceback in the log."""
    if not on_gpu():
        return
    few = asked.short + 16
    for batch in numbers(asked.batches):
        faulthandler.dump_traceback_later(patience, exit=True)
        with report.guarded(f"kernels of {batch} at {asked.context}"):
            some = prompts(batch, asked.context, asked.model, 99)
            (short_ms, short), (long_ms, long) = (busy(functools.partial(generate, some, tokens)) for tokens in (asked.short, few))
            a_step = few - asked.short
            report.add(
                "kernels", batch=batch, context=asked.context, device_ms=(long_ms - short_ms) / a_step, kernels=(long - short) / a_step
            )
    faulthandler.cancel_dump_traceback_later()


def busy(call: Callable[[], object]) -> tuple[float, int]:
    """Milliseconds in which the device ran something, and how many kernels and copies that were."""
    total, end = 0.0, 0.0
    found = kernels_of(call, copies=True)
    for one in found:
        total += max(0.0, one.end_us - max(one.start_us, end))
        end = max(end, one.end_us)
    return total * 1e-3, len(found)


def sweep(
    report: Report, generate: Generate, stamps: Stamps, asked: argparse.Namespace, points: Sequence[Point], chunk: int, **of_row: Any
) -> None:
    """A row for each point: ms a decode step from the times at which steps ended, where all requests decode. `chunk` is what a step
    computes of prompts."""
    for point in points:
        with report.guarded(f"sweep of {point.batch} at {point.context}"):
            report.add("sweep", **swept(generate, stamps, asked, point, chunk), **of_row)


def swept(generate: Generate, stamps: Stamps, asked: argparse.Namespace, point: Point, chunk: int) -> dict[str, Any]:
    tokens, heavy = sweep_tokens(asked, point, chunk), point.batch * point.context > HEAVY
    found: list[float] = []
    for draw in range(1 if heavy else asked.rounds):
        some = prompts(point.batch, point.context, asked.model, draw)
        stamps.times.clear()
        generate(some, tokens)
        times = steady(stamps.times, tokens, prefills(point, chunk))
        bounds = [round((len(times) - 1) * part / asked.rounds) for part in range(asked.rounds + 1)] if heavy else [0, len(times) - 1]
        found += [(times[last] - times[first]) / (last - first) * 1e3 for first, last in itertools.pairwise(bounds)]
    return {"batch": point.batch, "context": point.context, "runs": "parts" if heavy else "runs", **_spread(found)}


def steady(times: Sequence[float], tokens: int, prefill_steps: int) -> list[float]:
    """Of the times of a generation's steps those at whose step every request decoded. Raises where the calls were no steps."""
    if not tokens <= len(times) <= tokens + prefill_steps + 8:
        raise NoStepsError(f"{len(times)} calls of step for {tokens} tokens behind {prefill_steps} steps of prompts")
    last = len(times) - prefill_steps - 2  # the first requests end that much earlier than the last ones
    return list(times[last - (tokens - prefill_steps - 4) : last + 1])


def _spread(found: Sequence[float]) -> dict[str, float]:
    return {"wall_ms": statistics.median(found), "min_ms": min(found), "max_ms": max(found)}


def prefill(report: Report, generate: Generate, asked: argparse.Namespace, tokens: int) -> None:
    """A row: seconds until the first token of one prompt."""
    with report.guarded(f"prefill of {tokens}"):
        generate(prompts(1, tokens, asked.model), 1)
        found = []
        for draw in range(asked.rounds):
            some = prompts(1, tokens, asked.model, draw + 1)
            start = time.perf_counter()
            generate(some, 1)
            found.append(time.perf_counter() - start)
        report.add("prefill", tokens=tokens, **prefill_row(asked.model, tokens, found))


def prefill_row(model: str, tokens: int, seconds: Sequence[float]) -> dict[str, float]:
    median = statistics.median(seconds)
    return {"ms": median * 1e3, "max_ms": max(seconds) * 1e3, "tflops": prefill_operations(model, tokens) / median * 1e-12}


def memory(report: Report, name: str) -> None:
    """What the device has in use, the processes beside this one included."""
    if on_gpu():
        import torch

        gc.collect()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        report.add("memory", name=name, device_bytes=total - free, peak_bytes=peak, reserved_bytes=reserved)


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
