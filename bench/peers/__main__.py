"""rung beside its peers: the same shapes with random weights, the same prompts, one host, one run, within `--seconds`.

    python -m bench.peers --plan --vllm-path DIR:SITE                       # what would run, in what order, how long
    python -m bench.peers --devices 0,1 --vllm-path DIR:SITE --out peers/peers.json
    python -m bench.peers --models 135m --peers ours,vllm --out peers.json  # one device, vLLM from this Python's packages

Each peer runs in processes of its own: a start in empty caches with everything measured (cold), then a start in what it left (warm). Each
of `--devices` runs one process at a time, and takes the next whose caches are there; the host's processors are shared out among them. By
default, on two devices, for 8B: the decode table (B = 1, 8, 64, 256 behind 128 tokens), one prompt of 8192, the sweep over B = 1 to 512
and over contexts of 128 to 32k at B = 1 and 8, three runs each; for 8B in FP8 and 135M the decode table.

A decode step is one engine step in which each of B requests produces a token. The table's is ms from the difference between 144 and 16
tokens, median of three; the sweep's is from the times at which steps ended, where all requests decode, three runs of 80 tokens (from 32k
tokens of prompts on: three parts of one run). `busy` is the time in which the device ran something, from a profiler, at the end.

What it takes is a guess until it was measured (`--plan` has it by job), made of cold starts of 38 s (ours) and 100 s (vLLM), warm ones of
16 and 50: 8B with everything 143 s for ours and 205 s for vLLM, in its processes 87, FP8 65, 135M 46 and 108, in its processes 68,
transformers and reduce-overhead 104 each: 533 s on each of two devices. The order is such that the last jobs matter least; one that does
not fit into what is left of `--seconds` is left out, and said; one that fails costs its own rows.
Files: rows as JSON, the sweep as CSV and plot, and all logs in one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.asked import add_measured, numbers
from bench.peers.jobs import PEERS, Job, plan, run
from bench.peers.shapes import HF_CONFIGS
from bench.peers.table import render
from bench.sweep import BATCHES, CONTEXTS, write

_FITS = 0.7  # a job is begun when so much of its guess is left: rows come as they are measured


class Queue:
    """Jobs for several devices, in order, each once those are over whose caches it starts in."""

    def __init__(self, jobs: Sequence[Job], deadline: float) -> None:
        self._waiting, self._running, self._deadline = list(jobs), set[str](), deadline
        self._changed = threading.Condition()
        self.left_out: list[Job] = []

    def take(self) -> Job | None:
        """The next job; None when there is none any more."""
        with self._changed:
            while self._waiting:
                left, out = self._deadline - time.perf_counter(), {job.tag for job in self.left_out}
                late = [job for job in self._waiting if job.seconds * _FITS > left or job.after in out]
                self.left_out += late
                self._waiting = [job for job in self._waiting if job not in late]
                unfinished = self._running | {job.tag for job in self._waiting}
                if ready := next((job for job in self._waiting if job.after not in unfinished), None):
                    self._waiting.remove(ready)
                    self._running.add(ready.tag)
                    return ready
                if self._waiting:
                    self._changed.wait(1.0)
            return None

    def over(self, job: Job, *, ready: bool) -> None:
        """`ready`: it got as far as its first token. Where it did not, a start in its caches would be no warm one."""
        with self._changed:
            self._running.discard(job.tag)
            if not ready:
                self.left_out += [one for one in self._waiting if one.after == job.tag and one.start == "warm"]
                self._waiting = [one for one in self._waiting if one not in self.left_out]
            self._changed.notify_all()


def work(queue: Queue, device: str, cores: str, options: argparse.Namespace, folder: Path, begin: float, rows: list[Any]) -> None:
    """Run jobs on one device until there are none."""
    while (job := queue.take()) is not None:
        start = time.perf_counter()
        limit = max(1.0, min(options.time_limit, begin + options.seconds - start))
        try:
            found = run(job, device, cores, options, folder, limit)
        except (OSError, ValueError) as error:
            failure = {"kind": "failure", "what": "process", "error": f"{type(error).__name__}: {error}"}
            found = [{"peer": job.peer, "model": job.model, "start": job.start, "device": device, **failure}]
        rows += found  # one operation, so that threads need no lock
        options.out.write_text(json.dumps(rows))
        failed = sum(row["kind"] == "failure" for row in found)
        took = f"{start - begin:.0f} to {time.perf_counter() - begin:.0f} s (guess {job.seconds:.0f} s)"
        print(
            f"device {device or 'default'}: {job.tag}: {took}, {len(found)} rows" + (f", {failed} failures" if failed else ""), flush=True
        )
        queue.over(job, ready=any(row["kind"] == "phase" and row["name"] == "ready" for row in found))


def shares(devices: int) -> list[str]:
    """The host's processors in equal ranges, one for each device."""
    found = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(found) // devices
    if devices == 1 or not each:
        return [""] * devices
    return [",".join(map(str, found[at * each : (at + 1) * each])) for at in range(devices)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,8b-fp8,135m", help=f"of {', '.join(HF_CONFIGS)}")
    parser.add_argument("--peers", default=",".join(PEERS))
    add_measured(parser)
    parser.set_defaults(sweep_batches=BATCHES, sweep_contexts=CONTEXTS)
    parser.add_argument("--full-models", default="8b", help="models whose long prompts and sweep are measured too")
    parser.add_argument("--slow-models", default="135m", help="models that peers run which compile for each batch size")
    parser.add_argument("--slow-batches", default="1,8", help="batches of those peers")
    parser.add_argument("--devices", default="", help="CUDA devices, each with one process at a time; by default the one that there is")
    parser.add_argument("--no-warm", action="store_true", help="leave the second start out")
    parser.add_argument("--seconds", type=float, default=510, help="for all jobs")
    parser.add_argument("--time-limit", type=float, default=330, help="seconds for each process")
    parser.add_argument("--vllm-path", help="folders with vLLM, first on the path of its processes")
    parser.add_argument("--plan", action="store_true", help="print the jobs and stop")
    parser.add_argument("--show", type=Path, help="print the tables of this file of rows, and write its CSV and plot, instead of a run")
    parser.add_argument("--out", type=Path, default=Path("peers/peers.json"))
    options = parser.parse_args()
    for what, asked, known in (("peer", options.peers, PEERS), ("model", options.models, HF_CONFIGS)):
        if unknown := [name for name in asked.split(",") if name not in known]:
            parser.error(f"no {what} is named {', '.join(unknown)}; there are {', '.join(known)}")
    numbers(options.batches)
    return options


def main() -> None:
    options = arguments()
    options.out = options.out.resolve()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(options.show.read_text()) if options.show else []
    if not options.show:
        jobs = plan(options)
        devices = options.devices.split(",")
        guess = sum(job.seconds for job in jobs)
        print(f"{len(jobs)} jobs, {guess:.0f} s, {guess / len(devices):.0f} s on {len(devices)} devices; {options.seconds:.0f} s are given")
        if options.plan:
            print("\n".join(f"{job.tag:28} {job.seconds:5.0f} s" + (f"  after {job.after}" if job.after else "") for job in jobs))
            return
        rows += measure(jobs, devices, options)
    print(render(rows))
    print(write(rows, options.out.parent))


def measure(jobs: Sequence[Job], devices: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    queue = Queue(jobs, begin + options.seconds)
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    threads = [
        threading.Thread(target=work, args=(queue, device, cores, options, folder, begin, rows))
        for device, cores in zip(devices, shares(len(devices)), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in queue.left_out:
        why = f"left out: its cold start failed, or fewer seconds were left than guessed ({job.seconds:.0f})"
        rows.append({"peer": job.peer, "model": job.model, "start": job.start, "kind": "failure", "what": "process", "error": why})
    options.out.write_text(json.dumps(rows))
    with (options.out.parent / "logs.txt").open("w") as out:
        for log in sorted(folder.glob("*.log")):
            out.write(f"##### {log.stem}\n{log.read_text(errors='replace')[-200_000:]}\n")
    shutil.rmtree(folder, ignore_errors=True)
    return rows


if __name__ == "__main__":
    main()
