"""rung as a peer: `python -m bench.peers.ours --model 8b --out ours.json`.

Engines of one model and one compile, one after the other. The first takes requests of up to 4096 tokens and as many as the decode table
has: start-up, decode rows and the sweep over batches. Two are for one batch size, with full graphs for decodes and with piecewise ones
alone. The next has room for the sweep's larger batches, and another takes the long prompts. All compute up to 8192 tokens in a step, so
that a prompt of 8192 is one chunk, as it is for vLLM: beside 2048 that makes the largest batch of the kernels' rehearsal one of 8192
rows, and changes nothing in a decode, whose graphs end at 512 rows.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.peers.asked import DECODE_LEN, Point, batch_points, context_points, max_len, numbers, options, shape_of, sweep_tokens
from bench.peers.measure import Prompts, Report, Stamps, kernels, memory, on_gpu, prefill, prompts, steady, steps, sweep
from bench.peers.shapes import FP8, TARGETS

if TYPE_CHECKING:
    from rung.runner.config import Mode


def main() -> None:
    asked = options(__doc__)
    report = Report(asked.out)
    with report.phase("import torch"):
        import torch
    with report.phase("import rung"):
        import rung  # noqa: F401
    with report.phase("import rung.models"):
        from rung.models import SHAPES, quantize_fp8, random_model
    report.turn(asked)
    device = torch.device("cuda" if on_gpu() else "cpu")
    memory(report, "before")
    with report.phase("weights"):
        shape = replace(SHAPES[TARGETS[asked.model]], max_position_embeddings=shape_of(asked)["max_position_embeddings"])
        module = random_model(shape, dtype=torch.bfloat16 if on_gpu() else torch.float32, device=device)
        if asked.model in FP8:
            quantize_fp8(module)
        if on_gpu():
            torch.cuda.synchronize()
    batches = numbers(asked.batches)
    usual = [point for point in batch_points(asked) if point.batch <= max(batches)]
    large = [point for point in batch_points(asked) if point.batch > max(batches)]
    long = context_points(asked)
    length = min(DECODE_LEN, max_len(asked))
    with engine_of(module, asked, [*(Point(batch, asked.context) for batch in batches), *usual], length, None, report) as served:
        with report.phase("first token"):
            served.generate([[11, 12, 13]], 1)
        report.ready()
        if asked.start_only:
            return
        steps(report, served.generate, asked, served.stamps, served.chunk)
        sweep(report, served.generate, served.stamps, asked, usual, served.chunk, max_model_len=length)
        host(report, served, asked)
        if not (large or long or asked.prefill):
            kernels(report, served.generate, asked)
    piecewise(report, module, asked, length)
    if not (large or long or asked.prefill):
        return
    if large:
        with report.guarded("the engine for large batches"), engine_of(module, asked, large, length, large) as served:
            sweep(report, served.generate, served.stamps, asked, large, served.chunk, max_model_len=length)
    if long or asked.prefill:
        points = [*long, Point(1, asked.prefill)]
        with report.guarded("the engine for long prompts"), engine_of(module, asked, points, max_len(asked), points) as served:
            if asked.prefill:
                prefill(report, served.generate, asked, asked.prefill)
            sweep(report, served.generate, served.stamps, asked, long, served.chunk, max_model_len=max_len(asked))
    memory(report, "end")
    with report.guarded("the engine for the profiler"):
        points = [Point(batch, asked.context) for batch in batches]
        with engine_of(module, asked, points, length, points) as served:
            kernels(report, served.generate, asked)


class Served:
    """One engine, and what the measurements need of it."""

    def __init__(self, engine: Any, runner: Any) -> None:
        from rung.runner import SamplingParams

        self.engine, self.runner = engine, runner
        self.chunk: int = runner.config.max_num_tokens
        self.stamps = Stamps(engine)
        self._params = SamplingParams

    def generate(self, some: Prompts, tokens: int) -> None:
        self.engine.generate(some, self._params(max_tokens=tokens, ignore_eos=True))


@contextmanager
def engine_of(
    module: Any,
    asked: argparse.Namespace,
    points: Sequence[Point],
    length: int,
    captured: Sequence[Point] | None,
    report: Report | None = None,
    graphs: Mode = "full_and_piecewise",
) -> Iterator[Served]:
    """An engine with room for each of `points`, for requests of up to `length` tokens, with graphs for the batches of `captured`, or of the
    default ladder; its start goes to `report`."""
    import torch

    from rung.runner import RunnerConfig, build_engine

    largest, chunk = max(point.batch for point in points), 8192 if on_gpu() else 64
    blocks = max(point.batch * -(-(point.context + max(asked.long, sweep_tokens(asked, point, chunk))) // 16) for point in points)
    sizes = sorted({point.batch for point in (captured if captured is not None else points)})
    config = RunnerConfig(
        max_num_requests=largest,
        max_num_tokens=max(chunk, largest),
        max_model_len=length,
        num_blocks=blocks + -(-length // 16) + 1,
        graphs=graphs,
        capture_sizes=None if captured is None and on_gpu() else tuple(sizes),
        prefix_cache=False,
        kv_cache_dtype="fp8" if asked.model in FP8 else "auto",
        freeze_heap=True,  # so do engines that serve, vLLM's too
    )
    begin = time.perf_counter()
    engine, runner, start = build_engine(module, config)
    if report is not None:
        report.add("phase", name="build", seconds=time.perf_counter() - begin)
        _add_start(report, start)
    try:
        yield Served(engine, runner)
    finally:
        engine.executor.shutdown()
        del engine, runner, start
        gc.unfreeze()
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()


def _add_start(report: Report, start: Any) -> None:
    for name, seconds in start.seconds.items():
        report.add("phase", name=f"build: {name}", seconds=seconds)
    for name, seconds in (start.compile.seconds if start.compile is not None else {}).items():
        report.add("phase", name=f"compile: {name}", seconds=seconds)
    report.add("note", text=f"attention {start.attention}; launches {start.kernel_launches}")
    if start.capture is not None and (taken := start.capture.memory) is not None:
        count: dict[str, int] = {}
        for entry in start.capture.entries:
            count[entry.descriptor.mode.value] = count.get(entry.descriptor.mode.value, 0) + 1
        predicted = None if taken.predicted is None else taken.predicted.total_bytes
        report.add("graphs", count=count, bytes=taken.total_bytes, predicted=predicted, seconds=start.capture.seconds)


def piecewise(report: Report, module: Any, asked: argparse.Namespace, length: int, batch: int = 8) -> None:
    """A row: the step of one batch size in an engine whose graphs are piecewise over the same in one with full graphs for decodes."""
    if batch not in numbers(asked.batches):
        return
    best: dict[str, float] = {}
    modes: dict[str, Mode] = {"full": "full_and_piecewise", "piecewise": "piecewise"}
    points = [Point(batch, asked.context)]
    for name, graphs in modes.items():
        with report.guarded(f"piecewise beside full: {name}"), engine_of(module, asked, points, length, points, graphs=graphs) as served:
            found = []
            for draw in range(asked.rounds + 1):  # the first one warms up
                served.stamps.times.clear()
                served.generate(prompts(batch, asked.context, asked.model, draw), asked.sweep_long)
                times = steady(served.stamps.times, asked.sweep_long, -(-batch * asked.context // served.chunk) + 1)
                found.append((times[-1] - times[0]) / (len(times) - 1) * 1e3)
            best[name] = min(found[1:])
    if len(best) == len(modes):
        report.add("ratio", name=f"piecewise / full at {batch}", value=best["piecewise"] / best["full"], ms=best)


def host(report: Report, served: Served, asked: argparse.Namespace) -> None:
    """A row for the smallest and the largest batch: the host's time of a step, in us, without its wait for the device."""
    from bench.host_profile import HostProfile

    for batch in (min(numbers(asked.batches)), max(numbers(asked.batches))):
        with report.guarded(f"host time at {batch}"):
            profile = HostProfile(served.engine, served.runner)
            with profile.recording():
                served.generate(prompts(batch, asked.context, asked.model), asked.long)
            report.add("host", batch=batch, us=profile.table()[-1][1])


if __name__ == "__main__":
    main()
