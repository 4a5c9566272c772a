"""Which kernels a decode step runs and what each costs: `python -m bench.kernels llama-8b --size 8 --mode full`. Needs a GPU."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from typing import get_args

import torch

from bench.device_trace import kernels_of
from rung.cli.assembly import open_decoder
from rung.cli.bench_decoder import DecoderBench
from rung.cli.options import QUANTISATIONS
from rung.runner.config import KVCacheDtype

STEPS = 10


def kernels(
    target: str, size: int, mode: str, context: int, quantize: str | None, kv_cache_dtype: KVCacheDtype
) -> tuple[list[tuple[str, float, float]], float]:
    """(name, launches a step, us a step) by time, and the sum in us."""
    decoder = open_decoder(target, torch.bfloat16, torch.device("cuda"), shapes=True, quantize=quantize)
    bench = DecoderBench(
        decoder, (size,), (mode,), context=context, repeats=STEPS, sets=1, max_model_len=None, kv_cache_dtype=kv_cache_dtype
    )
    steps = next(bench.input_sets(size))
    for _ in range(3):
        steps[mode].start()()

    def some() -> None:
        for _ in range(STEPS):
            steps[mode].start()()

    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for one in kernels_of(some, copies=True):
        times[one.name] += one.us / STEPS
        counts[one.name] += 1
    rows = [(name, counts[name] / STEPS, time) for name, time in sorted(times.items(), key=lambda item: -item[1])]
    return rows, sum(times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--mode", default="full")
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--quantize", choices=tuple(QUANTISATIONS))
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto")
    options = parser.parse_args()
    rows, total = kernels(options.target, options.size, options.mode, options.context, options.quantize, options.kv_cache_dtype)
    print(f"{options.target} B={options.size} {options.mode}: {sum(count for _, count, _ in rows):.0f} kernels, {total:.0f} us a step")
    for name, count, time in rows[: options.rows]:
        print(f"{time:9.1f} us  {count:6.1f} x  {name[:110]}")


if __name__ == "__main__":
    main()
