"""rung beside its peers: the same shapes with random weights, the same prompts, one host, one run, within `--seconds`.

    python -m bench.peers --plan --vllm-path DIR:SITE                       # what would run, in what order, how long
    python -m bench.peers --vllm-path DIR:SITE --out peers/peers.json       # every row that has a target, on one device
    python -m bench.sweep --peers ours,vllm --vllm-path DIR:SITE --out sweep  # then, or when that has time left: the sweep

Each peer runs in processes of its own: a start in empty caches with everything measured (cold), then a start in what it left (warm; of
vLLM the one in its default processes, which are measured too). By default: for 8B the decode table (B = 1, 8, 64, 256 behind 128 tokens)
and one prompt of 8192, for 8B in FP8 and 135M the decode table, of transformers and reduce-overhead B = 1 and 8 of the 135M.
`--sweep-batches` and `--sweep-contexts` add the sweep to the processes of the models of `--full-models`.

A device runs one process at a time. The next one imports meanwhile, on processors of its own, and waits for its turn before it touches
the device: each has one half of the processors that a device gets (`--no-ahead`: all, and nothing is begun ahead). What was imported
beside another process' start or measurement is in `import` (vLLM's look at the model's class likewise), not in `build` and later phases;
`ready` leaves the wait out. While a start of ours that has targets runs no other process begins, on any device; a cold one has all
processors of its device.

A decode step is one engine step in which each of B requests produces a token. Its ms are from the times at which steps ended, where all
requests decode: the table's of the steps between 16 and 144 tokens, median of three generations, the sweep's of three of 80 tokens (from
32k tokens of prompts on: three parts of one). transformers shows no steps: there it is the difference between 144 and 16 tokens. `busy`
is the time in which the device ran something, from a profiler, at the end.

The plan is made of what jobs took on such a machine. The order is such that the last jobs matter least. A job for whose start and first
row too little of `--seconds` is left is not begun, and said; so none is cut while it starts unless it takes a quarter longer than it did.
One that fails costs its own rows. Files: rows as JSON, the sweep as CSV and plot, and all logs in one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.asked import add_measured, numbers
from bench.peers.jobs import PEERS, Job, plan, timetable
from bench.peers.queue import Device, Queue, shares
from bench.peers.shapes import HF_CONFIGS
from bench.peers.table import render
from bench.sweep import write


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,8b-fp8,135m", help=f"of {', '.join(HF_CONFIGS)}")
    parser.add_argument("--peers", default=",".join(PEERS))
    add_measured(parser)
    parser.add_argument("--full-models", default="8b", help="models whose long prompts, second starts and sweep are measured too")
    parser.add_argument("--slow-models", default="135m", help="models that peers run which compile for each batch size")
    parser.add_argument("--slow-batches", default="1,8", help="batches of those peers")
    parser.add_argument("--devices", default="", help="CUDA devices; by default the one that there is")
    parser.add_argument("--no-warm", action="store_true", help="leave the second start out")
    parser.add_argument("--no-ahead", action="store_true", help="begin no process before the device is free")
    parser.add_argument("--seconds", type=float, default=580, help="for all jobs")
    parser.add_argument("--time-limit", type=float, default=330, help="seconds for each process on its device")
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
    jobs, devices = plan(options), options.devices.split(",")
    if not options.show:
        times = timetable(jobs, len(devices), ahead=not options.no_ahead)
        needed = max((end for _, _, end in times), default=0.0)
        print(f"{len(jobs)} jobs, {needed:.0f} s on {len(devices)} devices; {options.seconds:.0f} s are given")
        if options.plan:
            print("\n".join(f"{job.tag:28} {begin:5.0f} to {end:5.0f} s, imports {job.imports:3.0f}" for job, begin, end in times))
            return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(options.show.read_text()) if options.show else measure(jobs, devices, options)
    print(render(rows))
    print(write(rows, options.out.parent))


def measure(jobs: Sequence[Job], devices: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    queue = Queue(jobs, begin + options.seconds)
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    places = [Device(name, cores, options, folder) for name, cores in zip(devices, shares(len(devices)), strict=True)]
    threads = [threading.Thread(target=place.work, args=(queue, rows, begin)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in queue.left_out:
        why = f"left out: what it needs failed, or fewer seconds were left than until its first row ({job.least:.0f})"
        rows.append({"peer": job.peer, "model": job.model, "start": job.start, "kind": "failure", "what": "process", "error": why})
    options.out.write_text(json.dumps(rows))
    with (options.out.parent / "logs.txt").open("w") as out:
        for log in sorted(folder.glob("*.log")):
            out.write(f"##### {log.stem}\n{log.read_text(errors='replace')[-200_000:]}\n")
    shutil.rmtree(folder, ignore_errors=True)
    return rows


if __name__ == "__main__":
    main()
