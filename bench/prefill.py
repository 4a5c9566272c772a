"""Prefill of one long prompt by chunk size, mode and attention backend, beside the device's peak. Needs a GPU for figures.

    python -m bench.prefill --target llama-8b --tokens 8191 --chunks 512,1024,2048,4096,8192 --out prefill.json

ms until the first token, in the whole engine; TFLOP/s counts the layers' products, causal attention and the head of one token. A chunk is
what one step computes of the prompt. `compiled` has no graphs, `piecewise` one graph for each piece, `full` holds attention too where the
backend can be captured with such lengths; `mode` says what the steps really ran in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from bench.peers.measure import on_gpu, prompts
from bench.peers.shapes import TARGETS, prefill_operations
from rung.cli.assembly import open_decoder
from rung.cli.options import resolve_device, resolve_dtype
from rung.runner import RunnerConfig, SamplingParams, build_engine

PEAK = 790e12
_MODEL = {target: model for model, target in TARGETS.items()}
_GRAPHS = {"compiled": "none", "piecewise": "piecewise", "full": "full"}


def measure(module: torch.nn.Module, target: str, tokens: int, chunk: int, mode: str, backend: str, rounds: int) -> dict[str, Any]:
    config = RunnerConfig(
        max_num_requests=1,
        max_num_tokens=chunk,
        max_model_len=tokens + 1,
        num_blocks=-(-(tokens + 1) // 16) + 2,
        graphs=_GRAPHS[mode],  # type: ignore[arg-type]
        capture_sizes=None if mode == "compiled" else tuple(sorted({1, *_sizes(tokens, chunk)})),
        attention_backend=backend,
        prefix_cache=False,
    )
    engine, runner, start = build_engine(module, config)
    found = []
    for draw in range(rounds + 1):
        some = prompts(1, tokens, _MODEL[target], draw)
        begin = time.perf_counter()
        engine.generate(some, SamplingParams(max_tokens=1, ignore_eos=True))
        found.append(time.perf_counter() - begin)
    seconds = statistics.median(found[1:])
    modes = {name: count for name, count in runner.counters.snapshot().items() if name.startswith("step.")}
    engine.executor.shutdown()
    operations = prefill_operations(_MODEL[target], tokens)
    return {
        "target": target,
        "tokens": tokens,
        "chunk": chunk,
        "mode": mode,
        "attention": start.attention,
        "ms": seconds * 1e3,
        "max_ms": max(found[1:]) * 1e3,
        "tflops": operations / seconds * 1e-12,
        "of_peak": operations / seconds / PEAK,
        "steps": modes,
    }


def _sizes(tokens: int, chunk: int) -> set[int]:
    """The sizes of the steps."""
    return {min(chunk, tokens), *({tokens % chunk} if tokens > chunk and tokens % chunk else ())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b", choices=tuple(_MODEL))
    parser.add_argument("--tokens", type=int, default=8191)
    parser.add_argument("--chunks", default="512,1024,2048,4096,8192")
    parser.add_argument("--modes", default="compiled,piecewise,full")
    parser.add_argument("--backends", default="flash_attn,triton_paged")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = resolve_device("auto")
    decoder = open_decoder(options.target, resolve_dtype("auto", device), device, shapes=True)
    rows: list[dict[str, Any]] = []
    for backend in options.backends.split(","):
        for chunk in (int(size) for size in options.chunks.split(",")):
            for mode in options.modes.split(","):
                try:
                    row = measure(decoder.module, options.target, options.tokens, chunk, mode, backend, options.rounds)
                except Exception as error:
                    traceback.print_exc()
                    print(f"{backend} {chunk} {mode}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    continue
                rows.append({"backend": backend, **row})
                print(
                    f"{backend:14} {chunk:6} {mode:10} {row['ms']:8.1f} ms {row['tflops']:6.0f} TFLOP/s {row['of_peak']:6.1%}", flush=True
                )
                if options.out is not None:
                    options.out.write_text(json.dumps(rows, indent=1) + "\n")
                if on_gpu():
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
