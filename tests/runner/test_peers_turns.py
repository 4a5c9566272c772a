"""`bench.peers` runs one process at a time on a device while the next one imports: small processes instead of peers."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.peers import queue as queue_module
from bench.peers.jobs import Job
from bench.peers.measure import Report
from bench.peers.process import ROOT, Process
from bench.peers.queue import Device, Queue, shares

# a peer that says when it imported, when it had the device and when it was done
CHILD = """
import json, os, sys, time
out, seconds, cores = sys.argv[1], float(sys.argv[2]), sys.argv[3]
rows = [{"kind": "note", "text": cores, "at": time.time(), "processors": sorted(os.sched_getaffinity(0))}]
time.sleep(0.2)
sys.stdin.readline()
rows.append({"kind": "turn", "at": time.time()})
time.sleep(0.2)
rows.append({"kind": "phase", "name": "ready", "seconds": 0.0, "at": time.time()})
def write():
    with open(out + ".new", "w") as file:
        json.dump(rows, file)
    os.replace(out + ".new", out)
write()
time.sleep(seconds)
rows.append({"kind": "end", "at": time.time()})
write()
"""


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(no_ahead=False, time_limit=20.0, out=tmp_path / "peers.json", seconds_of={})


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> None:
    def command_of(job: Job, options: argparse.Namespace, rows: Path, cores: Sequence[int]) -> list[str]:
        return [sys.executable, "-c", CHILD, str(rows), str(options.seconds_of.get(job.tag, 0.4)), ",".join(map(str, cores))]

    monkeypatch.setattr(queue_module, "command_of", command_of)
    monkeypatch.setattr(queue_module, "environment_of", lambda *_: dict(os.environ))


def run(
    found: Sequence[Job], options: argparse.Namespace, tmp_path: Path, seconds: float = 30.0
) -> tuple[Queue, dict[str, dict[str, Any]]]:
    """The rows of each job by kind, the last of a kind."""
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    queue = Queue(found, begin + seconds)
    Device("", [0, 1, 2, 3], options, tmp_path).work(queue, rows, begin)
    tags = {(job.peer, job.model, job.start): job.tag for job in found}
    by_job: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_job.setdefault(tags[row["peer"], row["model"], row["start"]], {})[row["kind"]] = row
    assert json.loads(options.out.read_text()) == rows
    return queue, by_job


def test_the_next_process_imports_while_one_measures_and_none_shares_the_device(options: argparse.Namespace, tmp_path: Path) -> None:
    first, second, third = (Job(peer, "tiny", "cold", None, 1.0) for peer in ("vllm", "ours", "transformers"))
    _, rows = run([first, second, third], options, tmp_path)
    for before, after in ((first, second), (second, third)):
        assert rows[after.tag]["note"]["at"] < rows[before.tag]["end"]["at"]  # imports beside it
        assert rows[after.tag]["turn"]["at"] > rows[before.tag]["end"]["at"]  # touches the device after it
    halves = [rows[job.tag]["note"]["text"] for job in (first, second, third)]
    assert halves == ["2,3", "0,1", "2,3"]


def test_nothing_is_begun_beside_a_start_that_has_targets(options: argparse.Namespace, tmp_path: Path) -> None:
    start, other = Job("ours", "8b", "cold", None, 1.0), Job("vllm", "8b", "cold", None, 1.0)
    assert start.alone
    assert not other.alone
    _, rows = run([start, other], options, tmp_path)
    ready = next(row for row in json.loads((tmp_path / f"{start.tag}.json").read_text()) if row["kind"] == "phase")
    assert ready["at"] < rows[other.tag]["note"]["at"] < rows[start.tag]["end"]["at"]
    assert rows[start.tag]["note"]["text"] == "0,1,2,3"  # all of them, as long as nothing is beside it


def test_nothing_is_begun_on_another_device_either(options: argparse.Namespace, tmp_path: Path) -> None:
    found = [Job("ours", "8b", "cold", None, 1.0), Job("vllm", "8b", "cold", None, 1.0), Job("vllm", "tiny", "cold", None, 1.0)]
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    queue = Queue(found, begin + 30.0)
    threads = [threading.Thread(target=Device(name, [], options, tmp_path).work, args=(queue, rows, begin)) for name in ("0", "1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    ready = next(row["at"] for row in rows if (row["peer"], row["kind"]) == ("ours", "phase"))
    begun = [row["at"] for row in rows if row["peer"] == "vllm" and row["kind"] == "note"]
    assert len(begun) == len(found) - 1
    assert ready < min(begun)


def test_a_job_taken_ahead_starts_alone_from_its_turn_on() -> None:
    ahead, other, third = Job("ours", "8b", "cold", None, 1.0), Job("vllm", "8b", "cold", None, 1.0), Job("vllm", "tiny", "cold", None, 1.0)
    queue = Queue([ahead, other, third], time.perf_counter() + 30.0)
    assert queue.take(wait=False) is ahead
    assert queue.take(wait=False) is other
    queue.starts(ahead)
    assert queue.take(wait=False) is None
    turn = threading.Thread(target=queue.starts, args=(other,))
    turn.start()
    turn.join(0.3)
    assert turn.is_alive()
    queue.started(ahead)
    turn.join(5.0)
    assert not turn.is_alive()
    assert queue.take(wait=False) is third


@pytest.mark.parametrize("end", ["over", "give_up"])
def test_a_start_that_comes_to_nothing_holds_nobody_up(end: str) -> None:
    start, other = Job("ours", "8b", "cold", None, 1.0), Job("vllm", "8b", "cold", None, 1.0)
    queue = Queue([start, other], time.perf_counter() + 30.0)
    assert queue.take() is start
    assert queue.take(wait=False) is None
    queue.give_up(start) if end == "give_up" else queue.over(start, ready=False)
    assert queue.take(wait=False) is other


def test_a_device_asks_for_each_turn(options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    starts = Queue.starts
    monkeypatch.setattr(Queue, "starts", lambda queue, job: (asked.append(job.tag), starts(queue, job)))
    found = [Job("vllm", "tiny", "cold", None, 1.0), Job("ours", "8b", "cold", None, 1.0)]
    run(found, options, tmp_path)
    assert list(dict.fromkeys(asked)) == [job.tag for job in found]


def test_a_job_begun_ahead_is_left_out_when_too_little_time_is_left(options: argparse.Namespace, tmp_path: Path) -> None:
    long, other = Job("ours", "tiny", "cold", None, 1.0), Job("vllm", "tiny", "cold", None, 4.0, first=2.0)
    options.seconds_of[long.tag] = 3.0
    queue, rows = run([long, other], options, tmp_path, seconds=4.0)
    assert set(rows) == {long.tag}
    assert queue.left_out == [other]
    assert not (tmp_path / f"{other.tag}.json").exists()  # ended while it waited


def test_the_limit_counts_from_the_turn_and_costs_no_rows(options: argparse.Namespace, tmp_path: Path) -> None:
    options.time_limit = 1.0
    first, second = (Job(peer, "tiny", "cold", None, 0.5) for peer in ("ours", "vllm"))
    options.seconds_of[second.tag] = 60.0
    _, rows = run([first, second], options, tmp_path)
    assert "failure" not in rows[first.tag]
    assert rows[second.tag]["failure"]["error"].startswith("ran past 1 s")
    assert "turn" in rows[second.tag]


def test_a_process_that_fails_while_it_imports_costs_only_itself(options: argparse.Namespace, tmp_path: Path) -> None:
    failing = Process(Job("ours", "tiny", "cold", None, 1.0), [sys.executable, "-c", "raise OSError('no')"], dict(os.environ), tmp_path)
    assert failing.over(10.0)
    failing.go()
    failure = next(row for row in failing.rows(10.0) if row["kind"] == "failure")
    assert failure["error"].startswith("ended with 1")
    assert "no" in failure["error"]


def test_what_a_process_started_is_gone_before_the_next_one_has_the_device(tmp_path: Path) -> None:
    code = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(child.pid)"
    process = Process(Job("ours", "tiny", "cold", None, 1.0), [sys.executable, "-c", code], dict(os.environ), tmp_path)
    assert process.over(10.0)
    started = int(next(tmp_path.glob("*.log")).read_text())
    os.kill(started, 0)
    process.end()
    with suppress(FileNotFoundError):
        assert Path(f"/proc/{started}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def test_processors_are_shared_out() -> None:
    (mine,) = shares(1)
    assert set(mine) == os.sched_getaffinity(0)
    assert [len(part) for part in shares(len(mine))] == [1] * len(mine)
    assert shares(len(mine) + 1) == [[]] * (len(mine) + 1)


def test_a_waiting_report_goes_on_with_a_line_and_leaves_the_wait_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Late(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            time.sleep(0.3)
            return super().readline()

    report = Report(tmp_path / "rows.json")
    monkeypatch.setattr("sys.stdin", Late("go\n"))
    report.turn(argparse.Namespace(wait=True))
    report.ready()
    (row,) = [row for row in report.rows if row["kind"] == "phase"]
    assert row["seconds"] < 0.2
    with pytest.raises(SystemExit):
        report.turn(argparse.Namespace(wait=True))  # stdin has ended
    report.turn(argparse.Namespace(wait=False))


def child(module: str, folder: Path, stdin: str, path: str = "") -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    rows = folder / "rows.json"
    command = [sys.executable, "-m", module, "--model", "tiny", "--batches", "1", "--context", "8", "--short", "2", "--long", "4"]
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}", "VLLM_CACHE_ROOT": str(folder)}
    out = subprocess.run(
        [*command, "--prefill", "0", "--wait", "--out", str(rows)], cwd=folder, env=environment, input=stdin, capture_output=True, text=True
    )
    return out, json.loads(rows.read_text())


def test_ours_waits_behind_its_imports(tmp_path: Path) -> None:
    out, rows = child("bench.peers.ours", tmp_path, "")
    assert out.returncode == 1
    assert [row["name"] for row in rows] == ["import torch", "import rung", "import rung.models"]


def test_vllm_looks_at_the_model_before_its_turn_with_what_the_engine_gets(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("""
class EngineArgs:
    def __init__(self, **wanted): self.wanted = wanted
    def create_model_config(self): print("looked", sorted(self.wanted.items()))
class SamplingParams:
    def __init__(self, **wanted): self.tokens = wanted["max_tokens"]
class Steps:
    def step(self): pass
class LLM:
    def __init__(self, **wanted):
        print("built", sorted(wanted.items()))
        self.llm_engine = Steps()
    def generate(self, prompts, params, use_tqdm): pass
""")
    out, rows = child("bench.peers.vllm_peer", tmp_path, "", str(tmp_path))
    assert out.returncode == 1
    assert [row["name"] for row in rows] == ["import torch", "import vllm", "look at the model"]
    out, rows = child("bench.peers.vllm_peer", tmp_path, "go\n", str(tmp_path))
    assert out.returncode == 0, out.stderr
    said = [line.split(" ", 1) for line in out.stdout.splitlines() if line.startswith(("looked", "built"))]
    assert [what for what, _ in said] == ["looked", "built"]
    assert said[0][1] == said[1][1]
    assert [row["batch"] for row in rows if row["kind"] == "step"] == [1]
