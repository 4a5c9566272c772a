"""Start-up by phase, cold and warm, in fresh processes.

    python -m bench.startup --target llama-8b --rounds 3 --out startup.json

A cold start has empty caches (Inductor, Triton, the artifact store), the warm one after it only the artifact store and the folder of Triton
that the cold one left: Inductor's own cache is empty again, as on a machine that was given the artifacts. Each phase is the median over
rounds, its spread beside it. Imports are rows of their own; the compile's phases (trace, compile, store, load) are parts of `compile`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIME_LIMIT = 180  # seconds for a process


def child(target: str, requests: int) -> dict[str, float]:
    """The phases of this process's start, in seconds."""
    found: dict[str, float] = {}
    begin = last = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        found[name], last = now - last, now

    import torch

    mark("import torch")
    import rung  # noqa: F401

    mark("import rung")
    from rung.models import random_model
    from rung.runner import RunnerConfig, SamplingParams, build_engine

    mark("import rung.runner")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.zeros(1, device=device)
    mark("device context")
    module = random_model(target, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    if on_gpu:
        torch.cuda.synchronize()
    mark("weights")
    config = RunnerConfig(
        max_num_requests=requests,
        max_num_tokens=max(2048 if on_gpu else 64, requests),
        max_model_len=min(4096, module.config.max_position_embeddings),
        num_blocks=1024,
        graphs="full_and_piecewise",
        capture_sizes=None if on_gpu else (1, requests),
    )
    modules = set(sys.modules)
    engine, _, start = build_engine(module, config)
    mark("build")
    found |= {f"build: {name}": seconds for name, seconds in start.seconds.items()}
    if start.compile is not None:
        found |= {f"compile: {name}": seconds for name, seconds in start.compile.seconds.items()}
    if start.kernels is not None:
        found |= {"images compiled": float(start.kernels.compiled), "of them in workers": float(start.kernels.in_workers)}
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True))
    mark("first token")
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    mark("second request")
    found["all"] = time.perf_counter() - begin
    new = set(sys.modules) - modules
    found["modules that the build imports"] = float(len(new))
    found["of them Inductor, Dynamo, Triton"] = float(sum(name.startswith(("torch._inductor", "torch._dynamo", "triton")) for name in new))
    return found


def start(target: str, requests: int, folder: Path, inductor: str, importtime: Path | None) -> dict[str, float]:
    """The phases of a process with these caches; empty when it failed, which is printed."""
    environment = {
        **os.environ,
        "RUNG_CACHE_DIR": str(folder / "store"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / inductor),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, *(["-X", "importtime"] if importtime else []), "-m", "bench.startup", "--child"]
    try:
        done = subprocess.run(
            [*command, "--target", target, "--requests", str(requests)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        print(f"a start ran past {TIME_LIMIT} s", flush=True)
        return {}
    if importtime is not None:
        importtime.write_text(done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"a start ended with {done.returncode}: {done.stderr[-1500:]}", flush=True)
        return {}
    found: dict[str, float] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b")
    parser.add_argument("--requests", type=int, default=256, help="slots: 256 gives 51 piecewise and 35 full graphs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--importtime", type=Path, help="a folder for Python's import times of the first cold and warm start")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.target, options.requests)), flush=True)
        return
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in runs:
                times = options.importtime / f"{kind}.txt" if options.importtime and number == options.rounds - 1 else None
                runs[kind].append(start(options.target, options.requests, Path(folder), f"inductor-{kind}", times))
    rows: list[dict[str, Any]] = []
    for phase in dict.fromkeys(name for kind in runs for one in runs[kind] for name in one):
        row: dict[str, Any] = {"phase": phase}
        for kind, found in runs.items():
            seconds = [one[phase] for one in found if phase in one]
            if seconds:
                row |= {kind: statistics.median(seconds), f"{kind}_min": min(seconds), f"{kind}_max": max(seconds)}
        rows.append(row)
    if options.out is not None:
        options.out.write_text(json.dumps({"target": options.target, "rows": rows, "runs": runs}, indent=1) + "\n")
    print(f"{options.target}: s, median (least to most) of {options.rounds}")
    for row in rows:
        cells = [
            f"{row[kind]:8.2f} ({row[f'{kind}_min']:.2f} to {row[f'{kind}_max']:.2f})" if kind in row else f"{'-':>8}" for kind in runs
        ]
        print(f"{row['phase']:34} " + "   ".join(f"{kind} {cell:26}" for kind, cell in zip(runs, cells, strict=True)))


if __name__ == "__main__":
    main()
