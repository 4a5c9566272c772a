"""A try: several products of a decode layer in one persistent kernel, against the kernels that rung launches one by one. Needs a GPU.

    python -m bench.persistent --out persistent.json              # blocks A, B and C, rows 1, 2, 4 and 8, all candidates
    python -m bench.persistent --blocks C --rows 1 --short        # one candidate a way of waiting
    python -m bench.persistent --between 0                        # nothing between the layers

A is norm, gate and up, silu, down and residual; B has o and its residual in front; C has the next layer's norm and qkv behind. Each figure
is us a layer, from one CUDA graph over as many layers as the model has, each of its own weights. Between the layers run small kernels, as
attention's do in a decode step: what is launched behind them may load its weights meanwhile. Their own time is part of each figure.

A candidate's rows are compared with float32 before it is timed and after the replays. Kernels are compiled first, on every core. What runs
on the GPU runs in a process of its own, which an alarm ends; it is started again behind the candidate that did not come back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.linear import timed
from bench.persistent_launch import BLOCKS, LAYER, Rows, Setting, Sizes, Weights, arguments, reference, run
from rung.launch.specialise import OPTIONS, specialise
from rung.models.random import SHAPES
from rung.passes.kernels import launches
from rung.passes.kernels.launches import Surroundings
from rung.passes.kernels.projections import linear_norm_linear, norm_linear
from rung.passes.kernels.tiles import tiles_for

TARGET = "smollm2-135m"
LAYERS = SHAPES[TARGET].num_layers
SECONDS = 15  # for one candidate; a wait that does not end traps long before
DEATHS = 4  # then no other candidate is tried


@dataclass(frozen=True, slots=True)
class Job:
    """A block of phases for some rows: how it is launched, or None for the kernels of today."""

    block: str
    rows: int
    setting: Setting | None

    def __str__(self) -> str:
        return f"{self.block} {self.rows}: {self.setting or 'today'}"


def sizes() -> Sizes:
    shape = SHAPES[TARGET]
    return Sizes(hidden=shape.hidden_size, query=shape.query_size, inner=shape.intermediate_size, qkv=shape.query_size + 2 * shape.kv_size)


def candidates(block: str, rows: int, programs: list[int], short: bool) -> Iterator[Setting]:
    """One row is tried most widely; with eight rows, a thread of 16 warps has too few registers."""
    warps = (8, 16) if rows <= 4 else (8,)
    ahead = (1,) if rows > 1 else (0, 1, 3) if block == "C" else (0, 1)
    for words, pause in ((True, 0), (True, 40), (False, 0)):
        if short:
            yield Setting(programs=programs[-1], words=words, pause=pause)
            continue
        for count, num_warps, phases in itertools.product(programs if rows <= 2 else programs[-1:], warps, ahead):
            yield Setting(programs=count, num_warps=num_warps, words=words, ahead=phases, pause=pause)


def compile_one(job: Job) -> str | None:
    """Compile the kernel of a job and keep it in the store; needs no GPU. Returns why it did not compile."""
    assert job.setting is not None
    values, named = arguments(BLOCKS[job.block], Weights.make(sizes(), "cpu"), Rows.make(sizes(), job.rows, "cpu"), job.setting, True)
    options = {name: named.get(name, default) for name, default in OPTIONS.items()}
    constants = {name: value for name, value in named.items() if name not in OPTIONS}
    try:
        LAYER.images.image(specialise(LAYER.parameters, values, constants), options, 90)
    except Exception as error:
        return f"{job}: {str(error)[:300]}"
    return None


def today(block: str, weights: Weights, rows: Rows) -> dict[str, torch.Tensor]:
    """The block by the kernels of the provider, launched programmatically."""
    if block == "A":
        hidden = rows.hidden
        activated = norm_linear(hidden, weights.norm, 1e-5, weights.gate_up, None, "silu")
    else:
        activated, hidden = linear_norm_linear(
            rows.attended, weights.o, None, rows.residual, weights.norm, 1e-5, weights.gate_up, None, "silu"
        )
    if block == "C":
        qkv, out = linear_norm_linear(activated, weights.down, None, hidden, weights.next_norm, 1e-5, weights.qkv, None, "")
        return {"out": out, "qkv": qkv}
    tiles = tiles_for(rows.hidden.shape[0], weights.down.shape[0], weights.down.shape[1])
    assert tiles is not None
    return {"out": launches.product(activated, weights.down, Surroundings(residual=hidden), tiles)}


def between(layers: list[Weights], rows: Rows, count: int) -> list[Callable[[], object]]:
    """A call for what stands behind each layer: `count` norms, launched programmatically."""

    def norms(weights: Weights) -> None:
        for _ in range(count):
            launches.add_norm(rows.attended, None, weights.norm, 1e-5, programmatic=True)

    return [lambda w=w: norms(w) for w in layers]


def chain(job: Job, layers: list[Weights], rows: Rows) -> tuple[list[Callable[[], object]], list[Rows]]:
    """A call a layer, and the rows that each call writes; each layer's residual is what the one before it wrote."""
    steps = [rows]
    for _ in layers[1:]:
        steps.append(steps[-1].next_layer(BLOCKS[job.block][0]))
    setting = job.setting
    if setting is not None:
        return [lambda w=w, r=r: run(BLOCKS[job.block], w, r, setting) for w, r in zip(layers, steps, strict=True)], steps
    current = {"out": rows.residual if job.block != "A" else rows.hidden}

    def layer(weights: Weights, first: bool) -> None:
        residual = (rows.hidden if job.block == "A" else rows.residual) if first else current["out"]
        current.update(today(job.block, weights, replace(rows, residual=residual, hidden=residual)))

    return [lambda w=w, i=i: layer(w, i == 0) for i, w in enumerate(layers)], steps


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value; 2 ** -8 is one rounding."""
    share = (found.float() - wanted).abs().max() / wanted.abs().max()
    return share.nan_to_num(1e9).item()


def check(job: Job, layers: list[Weights]) -> None:
    """One layer three times, each time with other rows. Raises AssertionError."""
    rows = Rows.make(sizes(), job.rows, "cuda")
    for _ in range(3):
        for tensor in (rows.attended, rows.residual, rows.hidden, rows.activated):
            tensor.normal_()
        wanted = reference(BLOCKS[job.block], layers[0], rows)
        if job.setting is None:
            found = today(job.block, layers[0], rows)
        else:
            run(BLOCKS[job.block], layers[0], rows, job.setting)
            found = {"out": rows.out} | ({"qkv": rows.qkv} if job.block == "C" else {})
        torch.cuda.synchronize()
        for name, tensor in found.items():
            assert (apart := distance(tensor, wanted[name])) < 0.02, f"{name} is {apart:.3f} of the largest value off"


def measure(job: Job, layers: list[Weights], count: int) -> float:
    """us a layer with `count` kernels behind it. Raises AssertionError where the rows of a layer are wrong after the replays."""
    rows = Rows.make(sizes(), job.rows, "cuda")
    calls, steps = chain(job, layers, rows)
    torch.cuda.synchronize()  # graphs are captured on a stream of their own, after the zeros that the programs count on
    behind = between(layers, rows, count)
    us = timed([lambda c=c, b=b: (c(), b()) for c, b in zip(calls, behind, strict=True)], rounds=9)
    if job.setting is not None:
        for weights, step in zip(layers, steps, strict=True):
            wanted = reference(BLOCKS[job.block], weights, step)["out"]
            assert (apart := distance(step.out, wanted)) < 0.02, f"a replayed layer is {apart:.3f} of the largest value off"
    return us


def work(jobs: list[Job], first: int, count: int) -> None:
    """Measure jobs from the `first` on; a line of JSON each. An alarm ends the process in a job that does not."""
    torch.manual_seed(0)
    layers = [Weights.make(sizes(), "cuda") for _ in range(LAYERS)]
    for number in range(first, len(jobs)):
        signal.alarm(SECONDS)
        line: dict[str, Any] = {"job": number}
        try:
            check(jobs[number], layers)
            line["us"] = measure(jobs[number], layers, count)
            if jobs[number].setting is None and count:
                line["between_us"] = timed(between(layers, Rows.make(sizes(), jobs[number].rows, "cuda"), count))
        except AssertionError as error:
            line["error"] = str(error)
        print(json.dumps(line), flush=True)
    signal.alarm(0)


def measured(jobs: list[Job], command: list[str]) -> list[dict[str, Any]]:
    """What each job took, or its error, from worker processes. Behind a job that ended its process, those of its kind are left out."""
    found: list[dict[str, Any]] = []
    for _ in range(DEATHS):
        worker = subprocess.run([*command, "--from", str(len(found))], capture_output=True, text=True)
        found += [json.loads(line) for line in worker.stdout.splitlines() if line.startswith("{")]
        if len(found) == len(jobs):
            break
        culprit = jobs[len(found)]
        ends = [line for line in worker.stderr.splitlines() if "Error" in line][-1:] or ["no word"]
        print(f"{culprit} ended its process with status {worker.returncode}: {ends[0][:200]}", flush=True)
        found.append({"job": len(found), "error": f"status {worker.returncode}"})
        while len(found) < len(jobs) and kind(jobs[len(found)]) == kind(culprit):
            found.append({"job": len(found), "error": "left out"})
    return found


def kind(job: Job) -> tuple[str, int, bool | None]:
    return job.block, job.rows, job.setting and job.setting.words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="A,B,C")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--programs", default="64,132", help="of a launch; all must fit on the device at once")
    parser.add_argument("--between", type=int, default=3, help="kernels between two layers")
    parser.add_argument("--short", action="store_true", help="one candidate a way of waiting")
    parser.add_argument("--count", action="store_true", help="list the candidates and stop")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--from", type=int, default=0, dest="first", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    groups = [(block, int(rows)) for rows in options.rows.split(",") for block in options.blocks.split(",")]
    programs = [int(count) for count in options.programs.split(",")]
    jobs = [Job(block, rows, setting) for block, rows in groups for setting in (None, *candidates(block, rows, programs, options.short))]
    if options.worker:
        work(jobs, options.first, options.between)
        return
    if options.count:
        print("\n".join(map(str, jobs)))
        return
    start = time.perf_counter()
    ours = [job for job in jobs if job.setting is not None]
    ours.sort(key=lambda job: -job.rows)  # the slow ones first
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), torch.set_num_threads, (1,)) as pool:
        failed = [why for why in pool.imap_unordered(compile_one, ours) if why]
    print(f"{len(ours)} kernels compiled in {time.perf_counter() - start:.0f} s, {len(failed)} do not compile: {failed[:2]}", flush=True)
    if options.compile_only:
        return
    command = [sys.executable, "-m", "bench.persistent", "--worker", "--blocks", options.blocks, "--rows", options.rows]
    command += ["--between", str(options.between), "--programs", options.programs, *(["--short"] if options.short else [])]
    start = time.perf_counter()
    found = measured(jobs, command)
    print(f"{len(found)} of {len(jobs)} measured in {time.perf_counter() - start:.0f} s", flush=True)
    show(jobs, found, groups)
    if options.out is not None:
        rows = [{**asdict(jobs[line["job"]]), **line} for line in found]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def show(jobs: list[Job], found: list[dict[str, Any]], groups: list[tuple[str, int]]) -> None:
    """The candidates of each block and number of rows, the fastest last, beside the kernels of today."""
    for block, rows in groups:
        lines = [line for line in found if (jobs[line["job"]].block, jobs[line["job"]].rows) == (block, rows)]
        for line in sorted(lines, key=lambda line: -line.get("us", float("inf"))):
            more = line.get("error", "") or (f"(what stands between alone: {line['between_us']:.2f})" if "between_us" in line else "")
            print(f"{line['us']:7.2f}" if "us" in line else "  wrong", jobs[line["job"]], more)


if __name__ == "__main__":
    main()
