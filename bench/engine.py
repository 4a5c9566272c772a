"""The whole engine: start-up by phase, then milliseconds a decode step from the difference between a long and a short generation.

    python -m bench.engine --target llama-8b --sizes 1,8,64,256 --out engine.json    # a GPU
    python -m bench.engine --sizes 1,64,256 --replay-steps 1,4,16 --host-profile

B prompts of random tokens run together, greedy, to `--short` and to `--long` tokens. A step is the difference over the number of steps,
so prefill and start-up drop out; scheduling, sampling and the read of the tokens stay in. The last table has a column for each of
`--replay-steps`. `--host-profile` adds a table of host time by function for each size, whose sum is the whole step. `--series N` adds one
more generation for each size, of `--series-tokens`, and prints N spans of it: the median step, and the device's clock and power.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.device_state import StateReader
from bench.host_profile import HostProfile, show
from bench.series import decode_series, print_series
from rung.cli.assembly import open_decoder
from rung.cli.options import QUANTISATIONS, resolve_device, resolve_dtype
from rung.runner import Engine, ModelRunner, RunnerConfig, SamplingParams, build_engine


def draw(rng: random.Random, requests: int, context: int, vocab: int) -> list[list[int]]:
    """Prompts of random tokens."""
    return [[rng.randrange(vocab) for _ in range(context)] for _ in range(requests)]


def generate(engine: Engine, rng: random.Random, requests: int, context: int, tokens: int, vocab: int) -> float:
    """Seconds for all requests, from the call to the last token."""
    prompts = draw(rng, requests, context, vocab)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - start


def measure(engine: Engine, vocab: int, requests: int, context: int, short: int, long: int, rounds: int) -> dict[str, Any]:
    """Median and spread over `rounds` differences, in ms."""
    rng = random.Random(requests)
    generate(engine, rng, requests, context, short, vocab)
    steps = []
    for _ in range(rounds):
        first = generate(engine, rng, requests, context, short, vocab)
        steps.append((generate(engine, rng, requests, context, long, vocab) - first) / (long - short) * 1e3)
    return {"requests": requests, "step_ms": statistics.median(steps), "min_ms": min(steps), "max_ms": max(steps)}


def profile_host(engine: Engine, runner: ModelRunner, vocab: int, requests: int, context: int, tokens: int) -> HostProfile:
    """Steady decoding of so many requests: the fastest quarter of the steps, which leaves prefills and ends out."""
    profile = HostProfile(engine, runner)
    with profile.recording():
        generate(engine, random.Random(requests), requests, context, tokens, vocab)
    return profile


def print_steps(rows: list[dict[str, Any]]) -> None:
    """ms a token of each request: a row for each size, a column for each number of replays."""
    columns = sorted({row["replay_steps"] for row in rows})
    print(f"{'ms a decode step':>18}" + "".join(f"{f'K={k}':>10}" for k in columns))
    for size in sorted({row["requests"] for row in rows}):
        found = {row["replay_steps"]: row["step_ms"] for row in rows if row["requests"] == size}
        print(f"{f'B={size}':>18}" + "".join(f"{found[k]:10.3f}" for k in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replay-steps", default="1", help="comma-separated; each is measured on an engine of its own")
    parser.add_argument("--capture-all", action="store_true", help="the default ladder instead of the measured sizes")
    parser.add_argument("--host-profile", action="store_true", help="also print where the host's time of a step goes")
    parser.add_argument("--series", type=int, default=0, help="so many spans of one long decode of each size; 0: none")
    parser.add_argument("--series-tokens", type=int, default=512, help="tokens of that decode")
    parser.add_argument("--attention", default="auto", help="the attention backend")
    parser.add_argument("--quantize", choices=tuple(QUANTISATIONS), help="e4m3 weights")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    device = resolve_device("auto")
    decoder = open_decoder(arguments.target, resolve_dtype("auto", device), device, shapes=True, quantize=arguments.quantize)
    rows: list[dict[str, Any]] = []
    longest = max(arguments.long, arguments.series_tokens if arguments.series else 0)
    limit = min(max(4096, arguments.context + longest), decoder.config.max_position_embeddings)
    reader = StateReader()
    for replay_steps in (int(k) for k in arguments.replay_steps.split(",")):
        config = RunnerConfig(
            max_num_requests=max(sizes),
            max_num_tokens=max(2048, max(sizes)),
            max_model_len=limit,
            num_blocks=max(sizes) * -(-(arguments.context + longest) // 16) + -(-limit // 16) + 1,
            graphs="full_and_piecewise",
            capture_sizes=None if arguments.capture_all else tuple(sorted({*sizes, 512})),
            replay_steps=replay_steps,
            prefix_cache=False,
            attention_backend=arguments.attention,
            kv_cache_dtype=arguments.kv_cache_dtype,
            freeze_heap=True,
        )
        engine, runner, start = build_engine(decoder.module, config)
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in start.seconds.items())
        print(f"{arguments.target} replay_steps={replay_steps}: {phases}; attention {start.attention}", flush=True)
        nodes = (
            {e.descriptor.num_requests: e.num_nodes for e in start.capture.entries if e.descriptor.num_requests} if start.capture else {}
        )
        print(f"{arguments.target} nodes of full graphs by batch: {nodes}", flush=True)
        for requests in sizes:
            row = measure(engine, decoder.config.vocab_size, requests, arguments.context, arguments.short, arguments.long, arguments.rounds)
            rows.append(
                {"target": arguments.target, "replay_steps": replay_steps, "nodes": nodes.get(requests), **row, "start_up_s": start.seconds}
            )
            spread = f"({row['min_ms']:.3f} to {row['max_ms']:.3f})"
            print(f"{arguments.target} K={replay_steps} B={requests}: {row['step_ms']:.3f} ms a step {spread}", flush=True)
        if arguments.host_profile:
            wanted = (engine, runner, decoder.config.vocab_size)
            profiles = [(f"B={size}", profile_host(*wanted, size, arguments.context, arguments.long)) for size in sizes]
            show(f"host us a plan of {replay_steps} steps", profiles)
        for size in sizes if arguments.series else ():
            prompts = draw(random.Random(size), size, arguments.context, decoder.config.vocab_size)
            spans = decode_series(engine, prompts, arguments.series_tokens, arguments.series, reader)
            print_series(f"{arguments.target} K={replay_steps} B={size}", spans)
            rows += [{"target": arguments.target, "replay_steps": replay_steps, "requests": size, "series": asdict(span)} for span in spans]
        if arguments.series and reader.why:
            print(f"no readings of the device: {reader.why}")
        engine.executor.shutdown()
        del engine, runner
        gc.unfreeze()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print_steps([row for row in rows if "series" not in row])
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
