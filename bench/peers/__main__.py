"""rung beside its peers: the same shapes with random weights, the same prompts, one machine, one run.

    python -m bench.peers --out peers.json                              # ours, transformers and torch on 8B and 135M
    python -m bench.peers --vllm-path DIR:SITE --models 8b --peers ours,vllm,vllm-processes --out peers.json

Each peer runs in processes of its own with a time limit: a start in empty caches with everything measured (cold), then a start in what it
left (warm). A decode step is one engine step in which each of B requests, 128 tokens of prompt behind it, produces a token: ms from the
difference between 144 and 16 tokens, median of three; beside it the time of its kernels. Without `--vllm-path` vLLM is taken from this
Python's packages. Logs and rows of each process go to the folder of `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.measure import numbers
from bench.peers.table import log_rows, render

ROOT = Path(__file__).parents[2]
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Peer:
    module: str
    environment: dict[str, str] = field(default_factory=dict)
    warm: bool = True  # whether a second start has something to find
    compiles_each_batch: bool = False


PEERS = {
    "ours": Peer("bench.peers.ours"),
    "vllm": Peer("bench.peers.vllm_peer", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    "vllm-processes": Peer("bench.peers.vllm_peer"),
    "transformers": Peer("bench.peers.transformers_peer", warm=False, compiles_each_batch=True),
    "reduce-overhead": Peer("bench.peers.transformers_peer", {"BARE": "1"}, warm=False, compiles_each_batch=True),
}


def run(name: str, model: str, options: argparse.Namespace, folder: Path, caches: Path, *, warm: bool) -> list[dict[str, Any]]:
    """The rows of one process, with those that its log gives; a failure or a time limit is a row too."""
    peer = PEERS[name]
    tag = f"{model}-{name}-{'warm' if warm else 'cold'}"
    rows, log = folder / f"{tag}.json", folder / f"{tag}.log"
    rows.unlink(missing_ok=True)
    environment = {**os.environ, **_QUIET, **peer.environment}
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "RUNG_CACHE_DIR", "VLLM_CACHE_ROOT"):
        environment[variable] = str(caches / f"{model}-{name}" / variable.lower())
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    if name.startswith("vllm") and options.vllm_path:
        paths.insert(0, options.vllm_path)
    environment["PYTHONPATH"] = ":".join(path for path in paths if path)
    batches = options.slow_batches if peer.compiles_each_batch else options.batches
    command = [sys.executable, "-m", peer.module, "--model", model, "--batches", batches, "--out", str(rows)]
    command += ["--contexts", options.contexts, "--prefill", str(options.prefill), "--rounds", str(options.rounds)]
    command += ["--short", str(options.short), "--long", str(options.long), "--memory", str(options.memory)]
    command += ["--positions", str(options.positions)] if options.positions else []
    command += ["--start-only"] if warm else []
    start = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(options.time_limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    found: list[dict[str, Any]] = json.loads(rows.read_text()) if rows.exists() else []
    found += log_rows(log.read_text(errors="replace"))
    if status != 0:
        what = f"ran past {options.time_limit} s" if status is None else f"ended with {status}; see {log.name}"
        found.append({"kind": "failure", "what": "process", "error": what})
    seconds = time.perf_counter() - start
    print(f"{tag}: {seconds:.0f} s, {len(found)} rows" + ("" if status == 0 else f", {found[-1]['error']}"), flush=True)
    found.append({"kind": "phase", "name": "whole process", "seconds": seconds})
    return [{"peer": name, "model": model, "start": "warm" if warm else "cold", **row} for row in found]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and those that it started, if any are left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,135m", help="of 8b, 135m, tiny")
    parser.add_argument("--peers", default="ours,vllm,vllm-processes,transformers,reduce-overhead")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--slow-batches", default="1,8", help="for peers that compile for each batch size")
    parser.add_argument("--contexts", default="128")
    parser.add_argument("--prefill", type=int, default=8191)
    parser.add_argument("--positions", type=int, help="positions of the model, where its own are too few")
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.7, help="part of the device's memory that vLLM may take")
    parser.add_argument("--no-warm", action="store_true", help="leave the second start out")
    parser.add_argument("--time-limit", type=float, default=240, help="seconds for each process")
    parser.add_argument("--vllm-path", help="folders with vLLM, first on the path of its processes")
    parser.add_argument("--caches", type=Path, help="an empty folder for all caches; a temporary one by default")
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    options = parser.parse_args()
    models, peers = options.models.split(","), options.peers.split(",")
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"no peer is named {', '.join(unknown)}; there are {', '.join(PEERS)}")
    numbers(options.batches)
    folder = options.out.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        caches = options.caches or Path(temporary)
        for model in models:
            for name in peers:
                for warm in (False, True) if PEERS[name].warm and not options.no_warm else (False,):
                    try:
                        rows += run(name, model, options, folder, caches, warm=warm)
                    except (OSError, ValueError) as error:
                        print(f"{model} {name}: {error}", flush=True)
                    options.out.write_text(json.dumps(rows, indent=1))
    print(render(rows))


if __name__ == "__main__":
    main()
