"""Bundles that were built elsewhere, on the device that they are for: nothing is compiled, the tokens and the speed are those of a native
build.

    python -m bench.consumer bundles/llama-8b.tar.xz bundles/smollm2-135m.tar.xz --out consumer.json

A bundle is named after the shape or model that it holds. Each is imported into an empty store and verified; then one fresh process with
that store (hits required, all other caches empty) and one with an empty store of its own (it compiles natively) do the same: build a
runner, time decode steps, and continue a prompt greedily. Build a bundle with

    rung precompile llama-8b --dtype bfloat16 --target h200 --out store && rung cache --store store export llama-8b.tar.xz
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIME_LIMIT = 170  # seconds for a process
QUESTION = "What is the capital of France?"
PROMPT = [5, 17, 200, 42, 7, 9, 101, 11]


def child(target: str, sizes: list[int], tokens: int) -> dict[str, Any]:
    """One process's start, step times and greedy tokens."""
    begin = time.perf_counter()
    import torch

    from rung.cli.assembly import open_decoder
    from rung.cli.bench_decoder import DecoderBench
    from rung.counters import counters
    from rung.runner import RunnerConfig, SamplingParams, build_engine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, Any] = {"imports": time.perf_counter() - begin}
    decoder = open_decoder(target, dtype, device, shapes=True)
    start = time.perf_counter()
    bench = DecoderBench(decoder, sizes, ("full",), context=64, repeats=20, sets=1, max_model_len=None)
    found |= {"build": time.perf_counter() - start, "phases": dict(bench.phases.seconds)}
    found["step_ms"] = {size: bench.run(size)["full"].as_json()["step_ms"] for size in sizes}
    del bench
    settings: dict[str, Any] = {"max_num_requests": 16, "max_num_tokens": 2048 if device.type == "cuda" else 512, "max_model_len": 512}
    engine, _, _ = build_engine(decoder.module, RunnerConfig(**settings, num_blocks=512, graphs="full_and_piecewise", capture_sizes=(1, 2)))
    ids = PROMPT if decoder.tokenizer is None else decoder.tokenizer.apply_chat([{"role": "user", "content": QUESTION}])
    (completion,) = engine.generate([ids], SamplingParams(max_tokens=tokens, ignore_eos=True))
    compilers = ("torch._inductor", "torch._dynamo", "triton")
    return {
        **found,
        "token_ids": list(completion.token_ids),
        "text": None if decoder.tokenizer is None else decoder.tokenizer.decode(list(completion.token_ids)),
        "counters": dict(counters),
        "compiler_modules": sum(name.startswith(compilers) for name in sys.modules),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def run_child(target: str, options: argparse.Namespace, folder: Path, store: Path, *, require_hit: bool) -> dict[str, Any]:
    """What a fresh process with this store says; {"failed": why} when it does not end well."""
    environment = {
        **os.environ,
        "RUNG_CACHE_DIR": str(store),
        "RUNG_REQUIRE_HIT": "1" if require_hit else "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"{store.name}-inductor"),
        "TRITON_CACHE_DIR": str(folder / f"{store.name}-triton"),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "bench.consumer", "--child", target, "--sizes", options.sizes, "--tokens", str(options.tokens)]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"ran past {TIME_LIMIT} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": done.stderr[-1500:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def cache(store: Path, *words: str) -> tuple[Any, float]:
    """The JSON of `rung cache` on a store, and the seconds of the process."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "rung.cli", "cache", "--store", str(store), *words, "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"rung cache {' '.join(words)} ended with {done.returncode}: {done.stderr[-800:]}")
    return json.loads(done.stdout), time.perf_counter() - begin


def consume(bundle: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one bundle."""
    target = bundle.name.partition(".")[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = folder / "shipped"
        _, import_seconds = cache(store, "import", str(bundle.absolute()))
        _, verify_seconds = cache(store, "verify")
        files = [path.stat().st_size for path in store.rglob("*") if path.is_file()]
        row: dict[str, Any] = {
            "target": target,
            "bundle_bytes": bundle.stat().st_size,
            "store_bytes": sum(files),
            "import_seconds": import_seconds,
            "verify_seconds": verify_seconds,
            "shipped": run_child(target, options, folder, store, require_hit=True),
        }
        if not options.no_native:
            choices = folder / "choices.tar"
            if cache(store, "ls", "--kind", "choices")[0]:
                cache(store, "export", str(choices), "--kind", "choices")
                cache(folder / "native", "import", str(choices))  # kernels of several configurations run the same one on both roads
            row["native"] = run_child(target, options, folder, folder / "native", require_hit=False)
        return row


def show(row: dict[str, Any]) -> bool:
    """Print a row; whether it is as it should be."""
    print(
        f"\n{row['target']}: bundle {row['bundle_bytes'] / 2**20:.2f} MiB, store {row['store_bytes'] / 2**20:.2f} MiB, "
        f"import {row['import_seconds']:.2f} s, verify {row['verify_seconds']:.2f} s (both with the start of their process)"
    )
    good = True
    for road in ("shipped", "native"):
        found = row.get(road, {})
        if "failed" in found or not found:
            print(f"  {road:8} {found.get('failed', 'not run')}")
            good = good and not found
            continue
        counts = found["counters"]
        steps = ", ".join(f"{size}: {one:.3f}" for size, one in found["step_ms"].items())
        print(
            f"  {road:8} imports {found['imports']:.2f} s, build {found['build']:.2f} s, traces {counts.get('dynamo_traces', 0)}, "
            f"compiles {counts.get('inductor_compiles', 0)}, pieces by rung's loader {counts.get('program_loads', 0)} of "
            f"{counts.get('artifact_loads', 0)}, tunings {counts.get('kernel_tunings', 0)}, compiler modules {found['compiler_modules']}; "
            f"step ms {steps}"
        )
        if road == "shipped":
            good = good and not counts.get("inductor_compiles") and not counts.get("dynamo_traces")
    both = [row[road].get("token_ids") for road in ("shipped", "native") if road in row]
    if len(both) == 2:
        same = both[0] is not None and both[0] == both[1]
        print(f"  greedy tokens of both: {'equal' if same else f'{both[0]} and {both[1]}'}; text {row['shipped'].get('text')!r}")
        good = good and same
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--sizes", default="1,8,64", help="requests of the decode steps")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--no-native", action="store_true", help="leave out the native build")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sizes = [int(size) for size in options.sizes.split(",")]
        print(json.dumps(child(options.child, sizes, options.tokens)), flush=True)
        return
    rows, good = [], True
    for bundle in options.bundles:
        rows.append(consume(bundle, options))
        good = show(rows[-1]) and good
        if options.out is not None:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
