"""Start-up by phase, cold and warm, in fresh processes.

    python -m bench.startup --target llama-8b --rounds 3 --out startup.json
    python -m bench.startup --target llama-8b --store store --gate       # from a store that was filled elsewhere, up to the first call

With `--gate` a process ends with the first compiled call: a decode step of one request with its attention, without head and sampler. The
row `gate` is everything from the module on its device to that call's result, all imports beyond torch included wherever they happen.

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


def gate_child(target: str, requests: int) -> dict[str, float]:
    """The phases up to the first compiled call, in seconds."""
    found: dict[str, float] = {}
    last = time.perf_counter()

    def mark(name: str) -> float:
        nonlocal last
        now = time.perf_counter()
        found[name], last = now - last, now
        return found[name]

    import torch

    mark("import torch")
    torch_modules = set(sys.modules)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    mark("device context")
    from rung.models import random_model

    gate = mark("import rung.models")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    module = random_model(target, dtype=dtype, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    mark("weights")
    from rung.attention import attention_layers
    from rung.attention.select import select_backend
    from rung.context import set_forward_context
    from rung.counters import Counters
    from rung.graphs import Dispatch, exact
    from rung.runner import RunnerConfig
    from rung.runner.batch import dummy_batch, dummy_query_lens
    from rung.runner.build import compile_model
    from rung.runner.forward import EagerForward
    from rung.runner.model_runner import ModelRunner
    from rung.runner.ops import default_ops

    gate += mark("import rung.runner")
    tokens = max(2048 if device.type == "cuda" else 512, requests)  # what `rung precompile` compiles for
    length = min(4096, module.config.max_position_embeddings)
    counters = Counters()
    compiled, report = compile_model(module, device, tokens, counters)
    gate += mark("compile or load")
    found |= {f"  {name}": seconds for name, seconds in report.seconds.items()}
    config = RunnerConfig(max_num_requests=requests, max_num_tokens=tokens, max_model_len=length, num_blocks=64, graphs="none")
    layers = attention_layers(module)
    chosen = {
        layer.spec: select_backend(layer.spec, dtype, device, config.block_size, config.attention_backend)[0] for layer in layers.values()
    }
    runner = ModelRunner(
        module,
        config,
        backend=lambda spec: chosen[spec](spec),
        forward=EagerForward(compiled),
        ops=default_ops(device)[0],
        num_blocks=64,
    )
    batch = dummy_batch(dummy_query_lens(1, requests, length), decode=True)
    step = runner.prepare(batch, Dispatch(exact(batch.shape)))
    gate += mark("attention and cache")
    with torch.no_grad(), set_forward_context(step.context):
        compiled(runner.buffers.input_ids[:1], runner.buffers.positions[:1])
    if device.type == "cuda":
        torch.cuda.synchronize()
    gate += mark("first call")
    new = set(sys.modules) - torch_modules
    return {
        **found,
        "gate": gate,
        "modules beyond torch's": float(len(new)),
        "of them Inductor, Dynamo, Triton": float(sum(name.startswith(("torch._inductor", "torch._dynamo", "triton")) for name in new)),
        "pieces run by rung's loader": float(counters["program_loads"]),
        "pieces": float(counters["artifact_loads"]),
    }


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


def start(
    target: str, requests: int, folder: Path, inductor: str, importtime: Path | None, *, store: Path | None = None, gate: bool = False
) -> dict[str, float]:
    """The phases of a process with these caches; empty when it failed, which is printed. A `store` that is given must hold everything."""
    environment = {
        **os.environ,
        **({} if store is None else {"RUNG_REQUIRE_HIT": "1"}),
        "RUNG_CACHE_DIR": str(store or folder / "store"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / inductor),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, *(["-X", "importtime"] if importtime else []), "-m", "bench.startup", "--child"]
    command += ["--gate"] if gate else []
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
    parser.add_argument("--gate", action="store_true", help="up to the first compiled call")
    parser.add_argument("--store", type=Path, help="an artifact store that was filled before; there is no cold start then")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        phases = gate_child if options.gate else child
        print(json.dumps(phases(options.target, options.requests)), flush=True)
        return
    store = None if options.store is None else options.store.absolute()
    runs: dict[str, list[dict[str, float]]] = {"warm": []} if store else {"cold": [], "warm": []}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in runs:
                times = options.importtime / f"{kind}.txt" if options.importtime and number == options.rounds - 1 else None
                caches = (Path(folder), f"inductor-{kind}", times)
                runs[kind].append(start(options.target, options.requests, *caches, store=store, gate=options.gate))
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
