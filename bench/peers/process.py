"""One process of a run: its command, its environment, and how it is begun, given its device and ended."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.peers.asked import max_len, max_requests
from bench.peers.jobs import PEERS, Job, of_model
from bench.peers.table import log_rows

ROOT = Path(__file__).parents[2]
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "RUNG_CACHE_DIR")
_FLASH = "RUNG_FLASH_ATTN_LIBRARY"
_PATIENCE = 10.0  # seconds for processes to end that were told to


def command_of(job: Job, options: argparse.Namespace, rows: Path, cores: Iterable[int]) -> list[str]:
    """The command line of a job. The longest request, the largest batch and the positions are those of the whole run of the model: they
    are part of what caches are looked up by."""
    part = of_model(job.peer, job.model, options)
    whole = of_model("ours", job.model, options)
    command = [sys.executable, "-m", PEERS[job.peer].module, "--model", job.model, "--out", str(rows), "--wait"]
    for name in ("batches", "context", "short", "long", "rounds", "prefill", "sweep_batches", "sweep_contexts", "context_batches"):
        command += [f"--{name.replace('_', '-')}", str(getattr(part, name))]
    command += ["--sweep-long", str(part.sweep_long), "--memory", str(part.memory)]
    command += ["--max-len", str(max_len(whole)), "--max-requests", str(max_requests(whole)), "--positions", str(max_len(whole))]
    command += ["--start-only"] if job.start == "warm" else []
    return [*command, "--cores", ",".join(map(str, sorted(cores)))] if cores else command


def environment_of(job: Job, device: str, options: argparse.Namespace, caches: Path) -> dict[str, str]:
    """What vLLM keeps by itself of one model is named by what it was made from, so all models have one folder; it looks at a model's class
    once then, which takes a second import of it."""
    peer = PEERS[job.peer]
    environment = {**os.environ, **_QUIET, **peer.environment, "VLLM_CACHE_ROOT": str(caches / "vllm")}
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


class Process:
    """A process of a job. It imports, waits for `go`, and measures then."""

    def __init__(self, job: Job, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.job = job
        self._rows, self._log = folder / f"{job.tag}.json", folder / f"{job.tag}.log"
        with self._log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._begin = time.perf_counter()

    def go(self) -> None:
        """The device is free for it."""
        self._begin = time.perf_counter()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it failed while importing; its log says how
            self._process.stdin.write(b"go\n")

    def over(self, seconds: float) -> bool:
        """Whether it ended within so many seconds from now."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self._process.poll() is not None

    def ready(self) -> bool:
        """Whether it has its first token."""
        return any(row["kind"] == "phase" and row["name"] == "ready" for row in self._written())

    def pin(self, cores: Iterable[int]) -> None:
        """The threads that it has now and those that they start; other processes that it started stay where they are."""
        for thread in Path(f"/proc/{self._process.pid}/task").glob("*"):
            with suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)

    def rows(self, limit: float) -> list[dict[str, Any]]:
        """Waits until it is over, for `limit` seconds from `go` on, and ends what is left of it then. Its rows, with those that its log
        gives; a failure or the limit is a row too."""
        late = not self.over(self._begin + limit - time.perf_counter())
        self.end()
        text = self._log.read_text(errors="replace")
        found = [*self._written(), *log_rows(text)]
        if late or self._process.returncode:
            what = f"ran past {limit:.0f} s" if late else f"ended with {self._process.returncode}"
            error = f"{what}; its log ends: {' | '.join(text.splitlines()[-4:])[-500:]}"
            found.append({"kind": "failure", "what": "process", "error": error})
        found.append({"kind": "phase", "name": "on the device", "seconds": time.perf_counter() - self._begin})
        return found

    def end(self) -> None:
        """The process and those that it started, if any are left. Waits until none holds memory of the device, which the next may need."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        until = time.perf_counter() + _PATIENCE
        while _alive(self._process.pid) and time.perf_counter() < until:
            time.sleep(0.05)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _written(self) -> list[dict[str, Any]]:
        return list(json.loads(self._rows.read_text())) if self._rows.exists() else []


def _alive(group: int) -> bool:
    """Whether a process of the group runs; one that ended but is not reaped, which may stay so for long in a container, does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False
