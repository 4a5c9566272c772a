"""`bench.peers` without its peers: which steps of a generation count, what runs in which order, and tables of runs that went wrong."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from bench.peers import jobs
from bench.peers.__main__ import arguments
from bench.peers.asked import Point, context_points, cores, max_len, max_requests, prefills
from bench.peers.jobs import Job, plan, timetable
from bench.peers.measure import Stamps, prompts, steady, step, swept
from bench.peers.process import command_of, environment_of
from bench.peers.queue import Queue
from bench.peers.table import log_rows, render
from bench.sweep import BATCHES, CONTEXTS, write


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["peers", "--vllm-path", "somewhere:else"])
    return arguments()


class Simulated:
    """An engine whose steps take no time but say what they did; it computes `chunk` tokens in a step, decodes first."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.left: list[list[int]] = []  # [prompt tokens, tokens to generate]
        self.decoding: list[int] = []  # requests that got a token, by step

    def step(self) -> None:
        budget, served = self.chunk, 0
        for one in self.left:
            if one[0] == 0:
                one[1] -= 1
                budget -= 1
                served += 1
        for one in self.left:
            taken = min(one[0], max(budget, 0))
            one[0] -= taken
            budget -= taken
            if taken and one[0] == 0:
                one[1] -= 1
                served += 1
        self.left = [one for one in self.left if one[1] > 0]
        self.decoding.append(served)

    def generate(self, some: list[list[int]], tokens: int) -> None:
        self.decoding.append(0)  # a first call that only enqueues
        stamp = self.step  # replaced by `Stamps`
        self.left = [[len(one), tokens] for one in some]
        while self.left:
            stamp()


@pytest.mark.parametrize(("batch", "context", "chunk"), [(1, 16, 64), (8, 16, 64), (12, 40, 64), (3, 200, 64)])
def test_only_steps_in_which_every_request_decodes_count(batch: int, context: int, chunk: int) -> None:
    engine, tokens = Simulated(chunk), 60
    stamps = Stamps(engine)
    engine.generate(prompts(batch, context, "tiny"), tokens)
    steps = prefills(Point(batch, context), chunk)
    numbered = steady(range(len(stamps.times)), tokens, steps)  # type: ignore[arg-type]
    assert len(numbered) >= tokens - steps - 4
    assert all(engine.decoding[1:][int(at)] == batch for at in numbered)


def test_calls_that_are_no_steps_are_refused() -> None:
    with pytest.raises(RuntimeError, match="calls of step"):
        steady([0.0] * 200, 60, 2)


@pytest.mark.parametrize(("calls", "way"), [(1, "stamps"), (2, "difference")])
def test_decode_rows_leave_prompts_out(calls: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one millisecond of a clock of the test's own, those with prompts of one to a hundred."""
    now, draws = 0.0, iter(range(1, 100))
    monkeypatch.setattr("bench.peers.measure.time.perf_counter", lambda: now)
    asked = argparse.Namespace(short=16, long=80, rounds=3, model="tiny", context=16)
    engine = Simulated(64)
    stamps = Stamps(engine)

    def generate(some: list[list[int]], tokens: int) -> None:
        engine.decoding.append(0)
        engine.left = [[len(one), tokens] for one in some]
        slow = next(draws)
        while engine.left:
            nonlocal now
            now += (1.0 if all(one[0] == 0 for one in engine.left) else float(slow)) * 1e-3
            engine.step()
            for _ in range(calls - 1):
                stamps.times.append(now)

    row = step(generate, asked, 8, stamps, 64)
    assert row["by"] == way
    if way == "stamps":
        assert (row["wall_ms"], row["min_ms"], row["max_ms"]) == pytest.approx((1.0, 1.0, 1.0))
    else:
        assert row["min_ms"] > 1.0  # prompts took longer from one generation to the next
    assert step(generate, asked, 8)["by"] == "difference"


def test_too_few_steps_between_the_two_lengths_are_a_difference() -> None:
    asked = argparse.Namespace(short=2, long=4, rounds=2, model="tiny", context=16)
    engine = Simulated(64)
    assert step(engine.generate, asked, 8, Stamps(engine), 64)["by"] == "difference"


def test_a_heavy_point_is_prefilled_once_and_has_its_spread_from_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = argparse.Namespace(sweep_long=60, rounds=3, model="tiny")
    for heavy, expected in ((10, 1), (10**6, 3)):
        monkeypatch.setattr("bench.peers.measure.HEAVY", heavy)
        engine, calls = Simulated(64), []
        stamps = Stamps(engine)

        def generate(some: list[list[int]], tokens: int, engine: Simulated = engine, calls: list[int] = calls) -> None:
            calls.append(tokens)
            engine.generate(some, tokens)

        row = swept(generate, stamps, asked, Point(4, 16), 64)
        assert len(calls) == expected
        assert row["runs"] == ("parts" if expected == 1 else "runs")
        assert row["min_ms"] <= row["wall_ms"] <= row["max_ms"]


def test_every_row_with_a_target_fits_into_one_run_on_one_device(options: argparse.Namespace) -> None:
    found = plan(options)
    assert [job.tag for job in found] == [
        "8b-ours-cold",
        "8b-fp8-ours-cold",
        "8b-vllm-cold",
        "8b-ours-warm",
        "135m-ours-cold",
        "8b-vllm-processes-cold",
        "135m-vllm-cold",
        "135m-transformers-cold",
        "135m-vllm-processes-cold",
    ]
    at = {job.tag: number for number, job in enumerate(found)}
    assert all(job.after is None or at[job.after] < at[job.tag] for job in found)
    assert next(job for job in found if job.tag == "8b-vllm-processes-cold").after == "8b-vllm-cold"
    times = timetable(found, 1)
    assert max(end for _, _, end in times) <= 560
    assert all(end <= begin for (_, _, end), (_, begin, _) in itertools.pairwise(times))


def test_the_plan_for_two_devices_leaves_a_start_with_targets_alone(options: argparse.Namespace) -> None:
    found = timetable(plan(options), 2)
    (first, begin, _), *others = found
    assert first.alone
    for job, turn, _ in others:
        assert turn - job.imports >= begin + first.first - 1e-6 or turn >= begin + first.first + job.imports - 1e-6
    alone = [(turn, turn + job.first) for job, turn, _ in found if job.alone]
    assert all(not start < turn < end for start, end in alone for _, turn, _ in found)


def test_imports_are_hidden_behind_the_process_before(options: argparse.Namespace) -> None:
    found = plan(options)
    times = {job.tag: (begin, end) for job, begin, end in timetable(found, 1)}
    assert times["8b-vllm-processes-cold"][0] == times["135m-ours-cold"][1]
    alone = timetable(found, 1, ahead=False)
    assert max(end for _, _, end in alone) - max(end for _, end in times.values()) > 100
    # a start of ours that has targets is over before the next process is begun
    job = next(job for job in found if job.alone)
    following = next(one for one in found if one.tag == "8b-fp8-ours-cold")
    assert times[following.tag][0] >= times[job.tag][0] + job.first + following.imports


def test_a_part_of_a_run_has_a_plan_too(options: argparse.Namespace) -> None:
    options.models, options.peers = "8b", "ours,vllm,vllm-processes"
    assert [job.tag for job in plan(options)] == ["8b-ours-cold", "8b-vllm-cold", "8b-ours-warm", "8b-vllm-processes-cold"]
    options.models, options.peers = "8b,135m", "vllm-processes,transformers"
    assert [job.tag for job in plan(options)] == ["8b-vllm-processes-cold", "135m-transformers-cold", "135m-vllm-processes-cold"]
    assert all(job.after is None for job in plan(options))
    options.models, options.peers = "8b-fp8", "vllm"
    assert plan(options) == []


def test_only_the_sweep_has_long_contexts(options: argparse.Namespace) -> None:
    assert max_len(jobs.of_model("ours", "8b", options)) == 8193
    assert max_len(jobs.of_model("ours", "135m", options)) == 4096
    options.sweep_batches, options.sweep_contexts = BATCHES, CONTEXTS
    commands = [command_of(job, options, Path("rows"), [0, 1]) for job in plan(options) if job.model == "8b"]
    for name in ("--max-len", "--max-requests", "--positions"):
        assert len({command[command.index(name) + 1] for command in commands}) == 1
    whole = jobs.of_model("ours", "8b", options)
    assert max_requests(whole) == 512
    assert max_len(whole) > 32768
    assert [point.batch * point.context for point in context_points(whole)][-1] == 8 * 32768


def test_processes_of_vllm_share_caches_and_see_their_device(options: argparse.Namespace, tmp_path: Path) -> None:
    one, other = (environment_of(Job(name, "8b", "cold", None, 1.0), "1", options, tmp_path) for name in ("vllm", "vllm-processes"))
    assert one["VLLM_CACHE_ROOT"] == other["VLLM_CACHE_ROOT"]
    assert one["TRITON_CACHE_DIR"] == other["TRITON_CACHE_DIR"]
    assert one["CUDA_VISIBLE_DEVICES"] == "1"
    assert one["PYTHONPATH"].startswith("somewhere:else:")
    assert one["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in {**other} or other["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0"


def job(peer: str, start: str, after: str | None, seconds: float = 1.0) -> Job:
    return Job(peer, "tiny", start, after, seconds)


def test_a_device_takes_the_next_job_whose_caches_are_there() -> None:
    cold, warm, other = job("ours", "cold", None), job("ours", "warm", "tiny-ours-cold"), job("vllm", "cold", None)
    queue = Queue([cold, warm, other], time.perf_counter() + 100)
    assert queue.take() is cold
    assert queue.take() is other  # the warm start waits
    assert queue.take(wait=False) is None
    queue.over(cold, ready=True)
    assert queue.take() is warm
    assert queue.take() is None
    assert queue.left_out == []


def test_what_does_not_fit_is_left_out_and_so_are_warm_starts_behind_a_failure() -> None:
    cold, long, warm = job("ours", "cold", None), job("vllm", "cold", None, 1000.0), job("ours", "warm", "tiny-ours-cold")
    behind = job("vllm", "warm", "tiny-vllm-cold")
    queue = Queue([cold, long, warm, behind], time.perf_counter() + 100)
    assert queue.take() is cold
    queue.over(cold, ready=False)
    assert queue.take() is None
    assert {one.tag for one in queue.left_out} == {long.tag, warm.tag, behind.tag}


def row(kind: str, peer: str = "ours", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "peer": peer, "model": "8b", "start": "cold", "device": "0", **values}


def test_figures_stand_beside_their_targets_and_a_failure_costs_only_its_own() -> None:
    rows = [
        row("step", batch=1, context=128, wall_ms=4.0, min_ms=3.99, max_ms=4.01),
        row("step", "vllm", batch=1, context=128, wall_ms=5.0, min_ms=4.8, max_ms=5.1),
        row("step", batch=8, context=128, wall_ms=4.2, min_ms=4.2, max_ms=4.2),
        row("kernels", batch=1, context=128, device_ms=3.9, kernels=231.0),
        row("prefill", tokens=8192, ms=200.0, max_ms=201.0, tflops=660.0),
        row("phase", name="import rung", seconds=0.002),
        row("phase", name="weights", seconds=0.002),
        row("phase", name="build: compile", seconds=8.0),
        row("phase", name="compile: import Inductor", seconds=2.5),
        row("phase", name="compile: import Dynamo", seconds=0.5),
        row("failure", "vllm", what="process", error="ran past 1 s"),
        row("sweep", batch=1, context=128, wall_ms=4.0, min_ms=4.0, max_ms=4.1, runs="runs"),
        row("sweep", batch=8, context=32768, wall_ms=6.0, min_ms=6.0, max_ms=6.1, runs="parts"),
    ]
    text = render(rows)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["gate"].split() == ["gate", "4.4", "4.5"]
    assert lines["ours / best vLLM"].split()[-2:] == ["0.800", "-"]
    assert "4.000 | 3.900" in lines["ours (device 0)"]
    assert "5.000 (4.800 to 5.100)" in lines["vllm (device 0)"]
    assert "83.5% (gate 70 %, goal 85 %)" in text
    assert "ours cold, s: import rung 0.00 (gate 0.2, goal 0.1), compile 8.00 (goal 6), compile without" in text
    assert "compile without imports 5.00 (gate 9), import Inductor 2.50, import Dynamo 0.50" in text
    assert "6.000 (6.000 to 6.100)*" in lines["B=8 at 32768"]
    assert "8b vllm cold: process: ran past 1 s" in text
    assert max(map(len, text.splitlines())) < 200


def test_a_run_without_any_row_still_says_so(tmp_path: Path) -> None:
    assert render([row("failure", what="process", error="ended with 1")]) == "8b ours cold: process: ended with 1"
    assert write([], tmp_path) == "no row of a sweep"


def test_the_sweep_is_written_as_csv(tmp_path: Path) -> None:
    said = write([row("sweep", batch=1, context=128, wall_ms=4.0, min_ms=4.0, max_ms=4.1, runs="runs", max_model_len=4096)], tmp_path)
    assert said.startswith("1 rows in sweep.csv")
    header, only = (tmp_path / "sweep.csv").read_text().splitlines()
    assert dict(zip(header.split(","), only.split(","), strict=True))["wall_ms"] == "4.0"


def test_vllms_log_gives_its_phases() -> None:
    log = """INFO Dynamo bytecode transform time: 7.05 s
INFO torch.compile took 19.40 s in total
INFO Graph capturing finished in 5 secs, took 0.59 GiB
INFO init engine (profile, create kv cache, warmup model) took 33.20 s (compilation: 19.40 s)"""
    found = {one["name"]: one.get("seconds", one.get("device_bytes")) for one in log_rows(log)}
    assert found == {"log: trace": 7.05, "log: compile": 19.4, "log: capture": 5.0, "log: engine": 33.2, "graphs": 0.59 * 2**30}


def test_processors_are_named_by_ranges() -> None:
    assert cores("0-2,7") == {0, 1, 2, 7}
    with pytest.raises(argparse.ArgumentTypeError):
        cores("a-b")
