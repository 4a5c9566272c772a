"""Decode steps in several graph modes, and where the host's time of each goes.

    python -m bench.modes --target llama-8b --sizes 8         # a GPU
    python -m bench.modes --sizes 1,8 --modes full,piecewise,python,none    # python: piecewise, attention breaks always in Python

A step in the steady state: the difference between a long and a short generation over the number of steps, without timers; then the same
decode under `bench.host_profile`. The last table has a column for each mode: launches of graphs, attention breaks (and the launchers of
those that run their Python), and what runs outside of graphs. `alone` is the step when nothing of the next one is enqueued before its
tokens are read. Each mode has the engine that runs decodes in it, one after the other: "full" and "none" one with full graphs for decodes,
"piecewise" and "python" one whose graphs are piecewise.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.engine import draw, measure, profile_host
from bench.host_profile import show
from rung.cli.assembly import open_decoder
from rung.cli.options import resolve_device, resolve_dtype
from rung.graphs import GraphMode
from rung.runner import Engine, ModelRunner, RunnerConfig, SamplingParams, build_engine
from rung.runner.config import Mode

_ENGINES: dict[Mode, tuple[str, ...]] = {"full_and_piecewise": ("full", "none"), "piecewise": ("piecewise", "python")}


@contextmanager
def best_mode(runner: ModelRunner, mode: str) -> Iterator[None]:
    """Inside, no step runs in a better mode. "python" is piecewise with the Python of every attention break."""
    forward: Any = runner.forward
    python = mode == "python"
    forward.dispatch = functools.partial(type(forward).dispatch, forward, best=GraphMode("piecewise" if python else mode))
    programs = [forward.manager.program(descriptor) for descriptor in forward.manager.captured] if python else []
    kept = [program._repeats for program in programs]
    for program in programs:
        program._repeats = None
    try:
        yield
    finally:
        del forward.dispatch
        for program, repeats in zip(programs, kept, strict=True):
            program._repeats = repeats


def alone(engine: Engine, requests: int, context: int, tokens: int, vocab: int) -> float:
    """Median ms of a decode step from the plan to its tokens on the host, on an idle device."""
    config = engine.scheduler.config
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for prompt in draw(random.Random(requests), requests, context, vocab):
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    times, kept = [], config.steps_in_flight
    object.__setattr__(config, "steps_in_flight", 1)  # frozen for its users; the engine asks before each step
    try:
        while engine.scheduler.has_unfinished:
            wait()
            start = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - start) * 1e3)
    finally:
        object.__setattr__(config, "steps_in_flight", kept)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--sizes", default="8")
    parser.add_argument("--modes", default="full,piecewise,python", help="of full, piecewise, python, none")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention", default="auto", help="the attention backend")
    arguments = parser.parse_args()
    sizes, modes = [int(size) for size in arguments.sizes.split(",")], arguments.modes.split(",")
    device = resolve_device("auto")
    decoder = open_decoder(arguments.target, resolve_dtype("auto", device), device, shapes=True)
    vocab, limit = decoder.config.vocab_size, min(4096, decoder.config.max_position_embeddings)
    settings: dict[str, Any] = {
        "max_num_requests": max(sizes),
        "max_num_tokens": max(2048, max(sizes)),
        "max_model_len": limit,
        "num_blocks": max(sizes) * -(-(arguments.context + arguments.long) // 16) + -(-limit // 16) + 1,
        "capture_sizes": tuple(sorted(sizes)),
        "prefix_cache": False,
        "attention_backend": arguments.attention,
        "freeze_heap": True,
    }
    found: dict[tuple[int, str], tuple[float, float]] = {}
    columns = []
    for graphs, theirs in _ENGINES.items():
        wanted = [mode for mode in modes if mode in theirs]
        if not wanted:
            continue
        with engine_of(decoder.module, RunnerConfig(**settings, graphs=graphs), arguments.target) as (engine, runner):
            for size, mode in itertools.product(sizes, wanted):
                with best_mode(runner, mode):
                    row = measure(engine, vocab, size, arguments.context, arguments.short, arguments.long, arguments.rounds)
                    one = alone(engine, size, arguments.context, arguments.long, vocab)
                    profile = profile_host(engine, runner, vocab, size, arguments.context, arguments.long)
                found[size, mode] = row["step_ms"], one
                spread = f"({row['min_ms']:.3f} to {row['max_ms']:.3f})"
                print(f"B={size} {mode}: {row['step_ms']:.3f} ms a step {spread}, alone {one:.3f}", flush=True)
                columns.append((f"B={size} {mode[:5]}", profile))
    for size in sizes:
        if {"full", "piecewise"} <= set(modes):
            ratios = [a / b for a, b in zip(found[size, "piecewise"], found[size, "full"], strict=True)]
            print(f"B={size} piecewise / full: {ratios[0]:.3f} a step, {ratios[1]:.3f} alone")
    show("host us a step", columns)


@contextmanager
def engine_of(module: Any, config: RunnerConfig, target: str) -> Iterator[tuple[Engine, ModelRunner]]:
    """An engine, whose start is printed, and what it counted in the end."""
    engine, runner, start = build_engine(module, config)
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in start.seconds.items())
    print(f"{target}, {config.graphs}: {phases}; attention {start.attention}", flush=True)
    yield engine, runner
    counted = runner.counters.snapshot()
    print("; ".join(f"{name} {count}" for name, count in sorted(counted.items()) if "step." in name or "break" in name))
    engine.executor.shutdown()
    gc.unfreeze()  # else this engine and its memory would stay


if __name__ == "__main__":
    main()
