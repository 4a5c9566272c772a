"""The processes of a run: which there are, in what order, how long each may take, and how one is run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.asked import HEAVY, batch_points, context_points, max_len, max_requests, numbers, prefills, sweep_tokens
from bench.peers.shapes import FP8, prefill_operations
from bench.peers.table import log_rows

ROOT = Path(__file__).parents[2]
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "RUNG_CACHE_DIR", "VLLM_CACHE_ROOT")
_FLASH = "RUNG_FLASH_ATTN_LIBRARY"


@dataclass(frozen=True)
class Peer:
    module: str
    environment: dict[str, str] = field(default_factory=dict)
    warm: bool = True  # whether a second start has something to find
    compiles_each_batch: bool = False
    caches: str = ""  # the peer whose caches it starts in, when that one has filled them; its own by default
    sweeps: bool = False
    fp8: bool = False
    seconds: tuple[float, float] = (100.0, 50.0)  # of a start, cold and warm, for the plan


PEERS = {
    "ours": Peer("bench.peers.ours", sweeps=True, fp8=True, seconds=(38.0, 16.0)),
    "vllm": Peer("bench.peers.vllm_peer", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, sweeps=True),
    "vllm-processes": Peer("bench.peers.vllm_peer", warm=False, caches="vllm", seconds=(60.0, 60.0)),
    "reduce-overhead": Peer("bench.peers.transformers_peer", {"BARE": "1"}, warm=False, compiles_each_batch=True, seconds=(20.0, 20.0)),
    "transformers": Peer("bench.peers.transformers_peer", warm=False, compiles_each_batch=True, seconds=(20.0, 20.0)),
}


@dataclass(frozen=True)
class Job:
    """One process. `after` is the tag of the job whose caches it starts in."""

    peer: str
    model: str
    start: str  # "cold" or "warm"
    after: str | None
    seconds: float  # what the plan expects

    @property
    def tag(self) -> str:
        return f"{self.model}-{self.peer}-{self.start}"


def plan(options: argparse.Namespace) -> list[Job]:
    """The jobs in the order in which they are begun: model by model, and of each the cold starts of ours and of vLLM first."""
    wanted = [name for name in PEERS if name in options.peers.split(",")]
    found = []
    for model in options.models.split(","):
        slow = model in options.slow_models.split(",")
        names = [name for name in wanted if (PEERS[name].fp8 or model not in FP8) and (slow or not PEERS[name].compiles_each_batch)]
        first, rest = names[:2], names[2:]
        warm = not options.no_warm and model not in FP8
        jobs = [_job(name, model, "cold", names, options) for name in first]
        for name in names:
            jobs += [_job(name, model, "cold", names, options)] if name in rest else []
            jobs += [_job(name, model, "warm", names, options)] if PEERS[name].warm and warm else []
        found += jobs
    return found


def _job(name: str, model: str, start: str, names: Sequence[str], options: argparse.Namespace) -> Job:
    peer = PEERS[name]
    after = f"{model}-{name}-cold" if start == "warm" else f"{model}-{peer.caches}-cold" if peer.caches in names else None
    return Job(name, model, start, after, _seconds(name, model, start, options))


def _seconds(name: str, model: str, start: str, options: argparse.Namespace) -> float:
    """A guess at the length of a job, to plan with: a step of 4 ms and what the batch adds, prompts at 500 TFLOP/s."""
    peer = PEERS[name]
    total = peer.seconds[start == "warm"]
    if start == "warm":
        return total
    part = of_model(name, model, options)
    base, each = (4.3, 0.02) if model.startswith("8b") else (1.5, 0.004)

    def seconds(batch: int, context: int, tokens: int, times: int) -> float:
        return times * (tokens * (base + each * batch) * 1e-3 + batch * prefill_operations(model, context) / 5e14)

    for batch in numbers(part.batches):
        total += seconds(batch, part.context, part.short, part.rounds + 3) + seconds(batch, part.context, part.long, part.rounds)
        total += (40.0 if peer.compiles_each_batch else 0.0) + 1.0
    for point in [*batch_points(part), *context_points(part)]:
        times = 1 if point.batch * point.context > HEAVY else part.rounds
        total += seconds(point.batch, point.context, sweep_tokens(part, point, 8192) + prefills(point, 8192), times)
    return total + (seconds(1, part.prefill, 1, part.rounds + 1) if part.prefill else 0.0)


def of_model(name: str, model: str, options: argparse.Namespace) -> argparse.Namespace:
    """What a peer measures of a model: long prompts and the sweep only of the models that get all, and by peers that can."""
    part = argparse.Namespace(**{**vars(options), "model": model})
    if PEERS[name].compiles_each_batch:
        part.batches = options.slow_batches
    if model not in options.full_models.split(",") or not PEERS[name].sweeps:
        part.sweep_batches = part.sweep_contexts = ""
        part.prefill = 0
    return part


def command_of(job: Job, options: argparse.Namespace, rows: Path, cores: str) -> list[str]:
    """The command line of a job. The longest request, the largest batch and the positions are those of the whole run of the model: they
    are part of what caches are looked up by."""
    part = of_model(job.peer, job.model, options)
    whole = of_model("ours", job.model, options)
    command = [sys.executable, "-m", PEERS[job.peer].module, "--model", job.model, "--out", str(rows)]
    for name in ("batches", "context", "short", "long", "rounds", "prefill", "sweep_batches", "sweep_contexts", "context_batches"):
        command += [f"--{name.replace('_', '-')}", str(getattr(part, name))]
    command += ["--sweep-long", str(part.sweep_long), "--memory", str(part.memory)]
    command += ["--max-len", str(max_len(whole)), "--max-requests", str(max_requests(whole)), "--positions", str(max_len(whole))]
    command += ["--start-only"] if job.start == "warm" else []
    return [*command, "--cores", cores] if cores else command


def environment_of(job: Job, device: str, options: argparse.Namespace, caches: Path) -> dict[str, str]:
    peer = PEERS[job.peer]
    environment = {**os.environ, **_QUIET, **peer.environment}
    for variable in _CACHES:
        environment[variable] = str(caches / f"{job.model}-{peer.caches or job.peer}" / variable.lower())
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    folders = options.vllm_path.split(":") if options.vllm_path else []
    if job.peer.startswith("vllm"):
        paths = [*folders, *paths]
    elif job.peer == "ours" and _FLASH not in environment:
        libraries = [Path(folder) / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so" for folder in folders]
        if library := next((library for library in libraries if library.is_file()), None):
            environment[_FLASH] = str(library)
    environment["PYTHONPATH"] = ":".join(path for path in paths if path)
    if device:
        environment["CUDA_VISIBLE_DEVICES"] = device
    return environment


def run(job: Job, device: str, cores: str, options: argparse.Namespace, folder: Path, limit: float) -> list[dict[str, Any]]:
    """The rows of one process, with those that its log gives; a failure or a time limit is a row too."""
    rows, log = folder / f"{job.tag}.json", folder / f"{job.tag}.log"
    command = command_of(job, options, rows, cores)
    start = time.perf_counter()
    with log.open("w") as out:
        environment = environment_of(job, device, options, folder / "caches")
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    found: list[dict[str, Any]] = json.loads(rows.read_text()) if rows.exists() else []
    text = log.read_text(errors="replace")
    found += log_rows(text)
    if status != 0:
        what = f"ran past {limit:.0f} s" if status is None else f"ended with {status}"
        found.append({"kind": "failure", "what": "process", "error": f"{what}; its log ends: {' | '.join(text.splitlines()[-4:])[-500:]}"})
    seconds = time.perf_counter() - start
    found.append({"kind": "phase", "name": "whole process", "seconds": seconds})
    return [{"peer": job.peer, "model": job.model, "start": job.start, "device": device, **row} for row in found]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and those that it started, if any are left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
