"""A soak of the engine: random arrivals, cancellations and ends in a KV cache that is too small, each answer held against a run alone.

    python -m bench.soak --minutes 10                                        # the tiny model
    python -m bench.soak --minutes 3 --target smollm2 --dtype float32

Engines of several configurations run one after the other (`VARIANTS`). Every request has to end, with the tokens it has alone; bad requests
have to be refused; when an engine is empty, so are its slots, blocks and queues, and on CUDA its memory is what it was. Prints one line,
and exits with 1 after any failure.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.soak_cases import Case, Verdict, describe, enliven, make_cases
from rung.cli.assembly import Decoder, open_decoder
from rung.cli.options import resolve_device, resolve_dtype
from rung.counters import Count
from rung.errors import RungError
from rung.models import SHAPES
from rung.runner import Engine, ModelRunner, RunnerConfig, SamplingParams, StepHooks, StepPlan, Update, build_engine

_GRAPHS: dict[str, Any] = {"graphs": "full_and_piecewise", "capture_sizes": (1, 2, 4, 8, 16, 32)}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"eager": True},
    "decode graphs": {**_GRAPHS, "decode_in_graph": True},
    "replays of 4": {**_GRAPHS, "decode_in_graph": True, "replay_steps": 4, "steps_in_flight": 3},
    "graphs, host sampling": {**_GRAPHS, "decode_in_graph": False, "long_prefill_chunk": 7},
    "no prefix cache": {**_GRAPHS, "decode_in_graph": True, "replay_steps": 2, "prefix_cache": False, "steps_in_flight": 1},
    "captured by traffic": {**_GRAPHS, "decode_in_graph": True, "capture_after": 3},
    "compiled": {"steps_in_flight": 1},
}
_BAD_KINDS = ("a token outside the vocabulary", "an id in use", "an empty prompt", "a prompt too long", "a bias outside the vocabulary")
_STALLED = 1000  # steps in a row without any token
_MEMORY_SLACK = 8 << 20  # bytes; what is allocated lazily once, such as penalty counts


# Twelve slots, and blocks for three requests of full length.
_SIZES: dict[str, Any] = {"max_num_requests": 12, "max_num_tokens": 48, "max_model_len": 96, "block_size": 16, "num_blocks": 1 + 18}


@dataclass(slots=True)
class Asked:
    case: Case
    params: SamplingParams
    aborted: bool = False


class PlanCounts(StepHooks):
    """What the scheduler made of the load."""

    def __init__(self, verdict: Verdict) -> None:
        self._counts = verdict.counts

    def before_forward(self, plan: StepPlan) -> None:
        self._counts["preempted"] += len(plan.preempted_request_ids)
        self._counts["plans of several steps"] += plan.num_steps > 1

    def no_work(self, plan: StepPlan) -> None:
        self._counts["preempted"] += len(plan.preempted_request_ids)


class Soak:
    """Drives one engine and judges what it hands out."""

    def __init__(self, engine: Engine, runner: ModelRunner, cases: Sequence[Case], vocab_size: int, rng: random.Random, verdict: Verdict):
        self.engine = engine
        self.runner = runner
        self.cases = self._asked = cases
        self.vocab_size = vocab_size
        self.rng = rng
        self.verdict = verdict
        self.open: dict[str, Asked] = {}
        runner.hooks = PlanCounts(verdict)
        self._ids = itertools.count()
        self._quiet = 0  # steps in a row without news
        self._memory = self._captures = 0
        self._drains = 0

    def run(self, seconds: float) -> None:
        """Phases of busy and of rare arrivals, each followed by a time without any, until the engine is empty."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self.verdict.failures) < 20:
            rate = self.rng.choice([0.05, 0.3, 1.0])
            # While somebody has a grammar no plan has several steps.
            self._asked = self.cases if self.rng.random() < 0.5 else [case for case in self.cases if case.params.grammar is None]
            for _ in range(self.rng.randint(20, 300)):
                self._events(rate)
                self._step()
            self._drain()

    def _events(self, rate: float) -> None:
        rng = self.rng
        while rng.random() < rate and len(self.open) < 40:
            case = rng.choice(self._asked)
            params = case.variation(rng)
            name = self.engine.add_request(case.prompt, params, request_id=f"r{next(self._ids)}" if rng.random() < 0.5 else None)
            self.open[name] = Asked(case, params)
            if rng.random() < 0.4:
                break
        if self.open and rng.random() < 0.05:
            name = rng.choice(list(self.open))
            self.open[name].aborted = True
            self.engine.abort(name)
        if rng.random() < 0.02:
            self._ask_badly(rng.choice(_BAD_KINDS))

    def _ask_badly(self, kind: str) -> None:
        prompt, params, name = [1], SamplingParams(), None
        if kind == "a token outside the vocabulary":
            prompt = [1, self.vocab_size]
        elif kind == "an id in use":
            name = next((name for name, asked in self.open.items() if not asked.aborted), None)
        elif kind == "an empty prompt":
            prompt = []
        elif kind == "a prompt too long":
            prompt = [1] * self.runner.config.max_model_len
        else:
            params = SamplingParams(logit_bias={self.vocab_size: 1.0})
        if kind == "an id in use" and name is None:
            return
        try:
            self.engine.add_request(prompt, params, request_id=name)
        except RungError:
            self.verdict.counts["refused"] += 1
        else:
            self.verdict.fail(f"{kind} was not refused")

    def _step(self) -> None:
        updates: list[Update] = self.engine.step() if self.engine.has_work else []
        self._quiet = 0 if updates or not self.engine.has_work else self._quiet + 1
        self.verdict.counts["steps"] += 1
        for update in updates:
            if update.completion is not None:
                asked = self.open.pop(update.request_id)
                self.verdict.judge(asked.case, asked.params, update.completion, aborted=asked.aborted)

    def _drain(self) -> None:
        while self.engine.has_work and self._quiet < _STALLED:
            self._step()
        self.verdict.counts["drains"] += 1
        self._drains += 1
        if self.open:
            self.verdict.fail(f"{len(self.open)} requests never ended, the first is {next(iter(self.open))}")
            self.open.clear()
        for what in left_overs(self.engine, self.runner):
            self.verdict.fail(f"left in an empty engine: {what}")
        self._check_memory()

    def _check_memory(self) -> None:
        """An empty engine has the memory it had at its second time, unless graphs were captured since."""
        now, captures = _allocated(self.runner.device), self.runner.counters[Count.CAPTURES]
        if self._drains <= 2 or captures != self._captures:
            self._memory, self._captures = now, captures
        elif now > self._memory + _MEMORY_SLACK:
            self.verdict.fail(f"an empty engine has {now - self._memory} bytes more than before")
            self._memory = now


def left_overs(engine: Engine, runner: ModelRunner) -> list[str]:
    """What an engine without work still holds, and should not."""
    scheduler, slots = engine.scheduler, runner.slots
    found = {
        "slots": slots.slot_of,
        "taken slots": set(range(slots.max_num_requests)) - set(slots.free_slots),
        "freed twice": [slot for slot in slots.free_slots if slots.free_slots.count(slot) > 1],
        "requests": scheduler.requests,
        "waiting": scheduler.waiting,
        "running": scheduler.running,
        "steps in flight": scheduler._in_flight,
        "requests that left": scheduler._left,
        "results in flight": engine._in_flight,
        "outputs": engine._outputs,
        "updates": engine._undelivered,
        "held blocks": scheduler.blocks._held,
        "owned blocks": [block for pool in scheduler.blocks.pools for block, owners in enumerate(pool._owners) if owners],
        "missing blocks": [pool.num_blocks - 1 - pool.num_free for pool in scheduler.blocks.pools if pool.num_free != pool.num_blocks - 1],
    }
    left = [f"{name} {value}" for name, value in found.items() if value]
    return left if runner.parked is None else [*left, "a parked step"]


def soak(
    decoder: Decoder,
    device: torch.device,
    *,
    seconds: float,
    seed: int,
    tie_gap: float = 1e-3,
    diverged_share: float = 0.01,
    num_cases: int = 32,
    variants: Sequence[str] = tuple(VARIANTS),
) -> Verdict:
    """`seconds` of work in all, making the cases and the engines not counted."""
    rng, vocab_size = random.Random(seed), decoder.config.vocab_size
    cases = make_cases(decoder.module, num_cases, RunnerConfig(**_SIZES), vocab_size, rng)
    print(describe(cases), flush=True)
    verdict = Verdict(tie_gap, diverged_share)
    # On CUDA all twice: the first time libraries keep workspaces of their own, for each stream.
    order = [*variants, *variants] if device.type == "cuda" else list(variants)
    kept = 0  # bytes without an engine
    for number, name in enumerate(order):
        engine, runner, start = build_engine(decoder.module, RunnerConfig(**_SIZES, **VARIANTS[name]))
        finished = verdict.counts["finished"]
        Soak(engine, runner, cases, vocab_size, rng, verdict).run(seconds / len(order))
        verdict.counts["prefix hit tokens"] += runner.counters[Count.PREFIX_HIT_TOKENS]
        took = ", ".join(f"{phase} {value:.1f} s" for phase, value in start.seconds.items())
        print(f"{name}: {verdict.counts['finished'] - finished} finished; {took}; attention {start.attention}", flush=True)
        engine.executor.shutdown()
        for layer in runner.layers.values():
            layer.kv_cache = None
        del engine, runner, start
        left = _allocated(device)
        if number < len(variants):
            kept = max(kept, left)
        elif left > kept + _MEMORY_SLACK:
            verdict.fail(f"{name}: {left - kept} bytes more stay allocated without an engine than after any of the first round")
    verdict.close()
    return verdict


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--target", default="tiny", help="a named shape with random weights, or what `rung generate` takes, such as smollm2"
    )
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=32, help="different prompts; each is run alone first")
    parser.add_argument("--variants", help=f"comma-separated, of: {', '.join(VARIANTS)}")
    parser.add_argument("--tie-gap", type=float, help="log-probabilities closer than this are a tie; default: 1e-3 in float32, else 0.2")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device)
    exact = dtype == torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    decoder = open_decoder(arguments.target, dtype, device, shapes=arguments.target in SHAPES)
    if arguments.target in SHAPES:
        enliven(decoder.module, arguments.seed)
    verdict = soak(
        decoder,
        device,
        seconds=arguments.minutes * 60,
        seed=arguments.seed,
        tie_gap=arguments.tie_gap if arguments.tie_gap is not None else (1e-3 if exact else 0.2),
        diverged_share=0.01 if exact else 1.0,
        num_cases=arguments.cases,
        variants=tuple(name.strip() for name in arguments.variants.split(",")) if arguments.variants else tuple(VARIANTS),
    )
    for failure in verdict.failures[:20]:
        print(f"FAILED {failure}", flush=True)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(verdict.counts.items()))
    result = "ok" if not verdict.failures else f"{len(verdict.failures)} failures"
    print(f"soak {arguments.target} {dtype} on {device.type}, {arguments.minutes:g} min, seed {arguments.seed}: {result}; {counts}")
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main())
