"""Where the device time of a decode step goes: each kind of kernel beside its floor, and the gaps between kernels. Needs a GPU.

    python -m bench.roofline --targets llama-8b --sizes 1,8,64,256 --out roofline.json
    python -m bench.roofline --targets llama-8b --sizes 1,256 --quantize fp8 --kv-cache-dtype fp8

The floor of a kernel is its bytes at 4.2 TB/s or its operations at 790 TFLOP/s (1580 for e4m3), whichever takes longer. Kernels are read
from the profiler over full decode graphs, two steps in flight as the engine runs them. A kernel that is launched programmatically starts
while its predecessor runs and waits for it: `own` is its whole time, `excl` what lies behind the end of every earlier kernel. The span of
a step, from its first kernel to the end of its last, is the sum of `excl` and the gaps; `over` is `excl` without the floor: ramps, tails,
and whatever could be better. One engine for all sizes of a target.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.device_trace import Kernel, kernels_of
from bench.steady import decoding
from bench.step_kernels import StepShares, medians, split_steps
from bench.step_kernels import kinds as kinds_of
from rung.cli.assembly import open_decoder
from rung.cli.options import QUANTISATIONS
from rung.models import LlamaConfig
from rung.runner import Engine, RunnerConfig, build_engine

BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.2e12, 790e12
STEPS, WARM, TIMED = 12, 4, 40
_NOT_OF_A_LAYER = ("head", "sampling", "input building")


class Clock:
    """Says what each part took, as it goes. A part that takes longer than `seconds` prints its traceback, and ends the process if `fatal`:
    what was printed until then stays, and a device that hangs would only cost time."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def begin(self, seconds: float, *, fatal: bool) -> None:
        self._last = time.perf_counter()
        faulthandler.dump_traceback_later(seconds, exit=fatal)

    def lap(self, what: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        print(f"  [{what} {time.perf_counter() - self._last:.2f} s]", flush=True)


def floors(config: LlamaConfig, batch: int, context: float, weight: int = 2, cache: int = 2) -> dict[str, tuple[float, float]]:
    """(bytes, seconds' worth of operations) of a whole step by kind; `weight` and `cache` are the bytes of an element of the layers'
    weights and of the KV cache."""
    hidden, layers, inner = config.hidden_size, config.num_layers, config.intermediate_size
    query, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    element = 2  # of activations, and of the head

    def product(rows: int, columns: int, times: int, size: int) -> tuple[float, float]:
        moved = size * rows * columns + element * batch * (rows + columns)
        return times * float(moved), times * 2.0 * batch * rows * columns / (OPERATIONS_A_SECOND * 2 / size)

    cached = batch * context * 2 * keys * cache
    return {
        "qkv": product(hidden, query + 2 * keys, layers, weight),
        "o": product(query, hidden, layers, weight),
        "gate_up": product(hidden, 2 * inner, layers, weight),
        "down": product(inner, hidden, layers, weight),
        "head": product(hidden, config.vocab_size, 1, element),
        "attention": (layers * (cached + 2 * batch * query * element), layers * 4.0 * batch * context * query / OPERATIONS_A_SECOND),
        "rope + cache write": (layers * batch * (query + 2 * keys) * element * 2.0, 0.0),
        "activation": (layers * batch * 3.0 * inner * element, 0.0),
        "norm": ((2 * layers + 1) * batch * 4.0 * hidden * element, 0.0),
        "sampling": (batch * config.vocab_size * float(element), 0.0),
    }


def floor_us(work: tuple[float, float]) -> float:
    return 1e6 * max(work[0] / BYTES_A_SECOND, work[1])


def table(layers: int, of: StepShares, work: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """A row for each kind, and the sums, in us."""
    kinds = kinds_of(of.names, layers)
    rows = []
    for kind in dict.fromkeys(kinds):
        mine = [at for at, one in enumerate(kinds) if one == kind]
        floor = floor_us(work[kind]) if kind in work else 0.0
        exclusive = sum(of.kernels[at].exclusive for at in mine)
        rows.append(
            {
                "kind": kind,
                "kernels": len(mine),
                "bytes": work.get(kind, (0.0, 0.0))[0],
                "floor_us": floor,
                "own_us": sum(of.kernels[at].own for at in mine),
                "exclusive_us": exclusive,
                "over_us": exclusive - floor,
                "names": list(dict.fromkeys(of.names[at] for at in mine)),
            }
        )
    floor = sum(floor_us(one) for one in work.values())
    exclusive = sum(one.exclusive for one in of.kernels)
    return {
        "rows": sorted(rows, key=lambda row: -float(row["exclusive_us"])),
        "inside other kernels": {kind: floor_us(one) for kind, one in work.items() if kind not in kinds},
        "kernels": len(of.names),
        "kernels_a_layer": sum(kind not in _NOT_OF_A_LAYER for kind in kinds) / layers,
        "floor_us": floor,
        "exclusive_us": exclusive,
        "over_us": exclusive - floor,
        "gaps_us": sum(one.gap for one in of.kernels),
        "span_us": of.span,
        "between_us": of.between,
    }


def record(engine: Engine, batch: int, context: int, vocab: int) -> tuple[list[list[Kernel]], float, float]:
    """The kernels of some steps, ms a step without a profiler, and the tokens behind a request meanwhile."""
    with decoding(engine, batch, context, WARM + TIMED + STEPS + 8, vocab) as steady:
        for _ in range(WARM):
            steady.step()
        begin = time.perf_counter()
        for _ in range(TIMED):
            steady.step()
        step_ms = (time.perf_counter() - begin) / TIMED * 1e3
        print(f"  [B={batch}: {step_ms:.3f} ms a step before the profiler]", flush=True)

        def steps() -> None:
            for _ in range(STEPS):
                steady.step()

        kernels = kernels_of(steps)
        behind = steady.context() - STEPS / 2
    return split_steps(kernels), step_ms, behind


def show(found: dict[str, Any]) -> str:
    """At most 16 lines of at most 120 characters."""
    between = "-" if found["between_us"] is None else f"{found['between_us']:.1f}"
    lines = [
        f"{found['target']} B={found['batch']} at {found['context']:.0f}: span {found['span_us']:.0f} us = floor {found['floor_us']:.0f} "
        f"+ over {found['over_us']:.0f} + gaps {found['gaps_us']:.0f}; between steps {between}; "
        f"{found['step_ms']:.3f} ms a step unprofiled",
        f"{found['kernels']} kernels, {found['kernels_a_layer']:.2f} a layer; {found['steps']} steps",
        f"{'kind':18} {'n':>4} {'MB':>8} {'floor':>7} {'own':>7} {'excl':>7} {'over':>7} {'each':>6}",
    ]
    for row in found["rows"]:
        each = row["exclusive_us"] / row["kernels"]
        lines.append(
            f"{row['kind']:18} {row['kernels']:4} {row['bytes'] / 1e6:8.1f} {row['floor_us']:7.1f} {row['own_us']:7.1f} "
            f"{row['exclusive_us']:7.1f} {row['over_us']:7.1f} {each:6.2f} {_short(row['names'])}"
        )
    if inside := found["inside other kernels"]:
        lines.append("inside other kernels, floor: " + ", ".join(f"{kind} {floor:.1f}" for kind, floor in inside.items()))
    return "\n".join(lines)


def _short(names: Sequence[str], width: int = 46) -> str:
    """What tells the names apart, without a kernel's arguments and namespaces."""
    bare = [name.removeprefix("void ").split("(")[0].split("<")[0].rpartition("::")[2] or name for name in names]
    return ", ".join(dict.fromkeys(one.removesuffix("_kernel") for one in bare))[:width]


def build(target: str, sizes: Sequence[int], options: argparse.Namespace) -> tuple[Engine, LlamaConfig]:
    """An engine with a full decode graph for each size and nothing else."""
    decoder = open_decoder(target, torch.bfloat16, torch.device("cuda"), shapes=True, quantize=options.quantize)
    prefills = -(-max(sizes) * options.context // 2048)
    tokens = options.context + WARM + TIMED + STEPS + prefills + 64
    config = RunnerConfig(
        max_num_requests=max(sizes),
        max_num_tokens=max(2048, max(sizes)),
        max_model_len=max(2048, tokens),
        num_blocks=max(sizes) * -(-tokens // 16) + -(-max(2048, tokens) // 16) + 1,
        graphs="full_decode_only",
        capture_sizes=tuple(sorted(sizes)),
        prefix_cache=False,
        attention_backend=options.attention,
        kv_cache_dtype=options.kv_cache_dtype,
        freeze_heap=True,
    )
    engine, _, start = build_engine(decoder.module, config)
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in start.seconds.items())
    print(f"{target}: {phases}; {start.attention}", flush=True)
    return engine, decoder.config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="llama-8b,smollm2-135m")
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--attention", default="auto", help="the attention backend")
    parser.add_argument("--quantize", choices=tuple(QUANTISATIONS), help="e4m3 weights")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--patience", type=float, default=45, help="seconds after which a size ends the process, with its traceback")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = [int(one) for one in options.sizes.split(",")]
    clock = Clock()
    found: list[dict[str, Any]] = []
    for target in options.targets.split(","):
        clock.begin(2 * options.patience, fatal=False)
        try:
            engine, config = build(target, sizes, options)
            clock.lap("engine")
            clock.begin(options.patience, fatal=True)
            kernels_of(lambda: torch.zeros(1, device="cuda"))  # its first start takes seconds
            clock.lap("profiler")
        except Exception:
            traceback.print_exc()
            continue
        for size in sizes:
            clock.begin(options.patience, fatal=True)
            try:
                found.append(one_size(engine, config, target, size, options))
            except Exception:
                traceback.print_exc()
                continue
            clock.lap(f"B={size}")
            print(show(found[-1]), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
        engine.executor.shutdown()
        del engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()


def one_size(engine: Engine, config: LlamaConfig, target: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    steps, step_ms, behind = record(engine, size, options.context, config.vocab_size)
    if not steps:
        raise RuntimeError(f"the profiler saw no decode graph at {size} requests")
    weight, cache = 1 if options.quantize else 2, 1 if options.kv_cache_dtype == "fp8" else 2
    one = table(config.num_layers, medians(steps), floors(config, size, behind, weight, cache))
    return {"target": target, "batch": size, "context": behind, "step_ms": step_ms, "steps": len(steps), **one}


if __name__ == "__main__":
    main()
