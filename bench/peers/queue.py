"""Jobs on devices: each device has one process at a time, while the next one imports and waits for its turn."""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.peers.jobs import Job
from bench.peers.process import Process, command_of, environment_of


class Queue:
    """Jobs for several devices, in order, each once those are over whose caches it starts in; none while a job starts alone on one of
    them."""

    def __init__(self, jobs: Sequence[Job], deadline: float) -> None:
        self._waiting, self._running, self._deadline = list(jobs), set[str](), deadline
        self._alone = ""  # the tag of a job that starts alone
        self._changed = threading.Condition()
        self.left_out: list[Job] = []

    @property
    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.perf_counter()

    def take(self, *, wait: bool = True) -> Job | None:
        """The next job; None when there is none any more or, without `wait`, now. With `wait` it starts at once."""
        with self._changed:
            while self._waiting:
                out = {job.tag for job in self.left_out}
                self._leave_out([job for job in self._waiting if job.least > self.left or job.after in out])
                unfinished = self._running | {job.tag for job in self._waiting}
                ready = next((job for job in self._waiting if job.after not in unfinished), None)
                if ready is not None and not self._alone:
                    self._waiting.remove(ready)
                    self._running.add(ready.tag)
                    if wait:
                        self.starts(ready)
                    return ready
                if not wait:
                    return None
                self._changed.wait(1.0)
            return None

    def starts(self, job: Job) -> None:
        """Wait for its turn: until no other starts alone. If it does itself, none is given out or gets its turn until it has `started`."""
        with self._changed:
            while self._alone not in ("", job.tag) and self.left > 0:
                self._changed.wait(1.0)
            self._alone = job.tag if job.alone else self._alone

    def started(self, job: Job) -> None:
        with self._changed:
            if self._alone == job.tag:
                self._alone = ""
                self._changed.notify_all()

    def over(self, job: Job, *, ready: bool) -> None:
        """`ready`: it got as far as its first token. Where it did not, a start in its caches would be no warm one."""
        with self._changed:
            self._running.discard(job.tag)
            self.started(job)
            if not ready:
                self._leave_out([one for one in self._waiting if one.after == job.tag and one.start == "warm"])
            self._changed.notify_all()

    def give_up(self, job: Job) -> None:
        """A job that was taken does not fit any more."""
        with self._changed:
            self._running.discard(job.tag)
            self.started(job)
            self.left_out.append(job)
            self._changed.notify_all()

    def _leave_out(self, jobs: Sequence[Job]) -> None:
        self.left_out += jobs
        self._waiting = [job for job in self._waiting if job not in jobs]


class Device:
    """A device and its share of the processors, of which the process that measures has one half and the next one the other."""

    def __init__(self, name: str, cores: Sequence[int], options: argparse.Namespace, folder: Path) -> None:
        self.name, self._options, self._folder = name, options, folder
        half = len(cores) // 2
        self._cores = list(cores)
        self._halves = [self._cores] * 2 if options.no_ahead or not half else [self._cores[:half], self._cores[half:]]
        self._launched = 0

    def work(self, queue: Queue, rows: list[dict[str, Any]], begin: float) -> None:
        """Run jobs until there are none; their rows go to `rows`."""
        following: Process | None = None
        while (current := following or self._launch(queue.take(), whole=True)) is not None:
            following, half = None, self._half
            job = current.job
            queue.starts(job)
            start = time.perf_counter()
            if job.least > queue.left:
                current.end()
                queue.give_up(job)
                continue
            current.go()
            limit = max(1.0, min(self._options.time_limit, queue.left))
            while job.alone and not current.ready() and not current.over(0.25) and time.perf_counter() < start + limit:
                pass
            if job.alone:
                queue.started(job)
                current.pin(half)
            if not self._options.no_ahead and not current.over(0):
                following = self._launch(queue.take(wait=False))
            found = [{"peer": job.peer, "model": job.model, "start": job.start, "device": self.name, **row} for row in current.rows(limit)]
            rows += found  # one operation, so that threads need no lock
            self._options.out.write_text(json.dumps(rows))
            _say(self.name, job, found, start - begin, time.perf_counter() - begin)
            queue.over(job, ready=any(row["kind"] == "phase" and row["name"] == "ready" for row in found))

    @property
    def _half(self) -> list[int]:
        """Of the process launched last."""
        return self._halves[self._launched % 2]

    def _launch(self, job: Job | None, *, whole: bool = False) -> Process | None:
        """`whole`: nothing runs beside it, so it starts on all processors of this device."""
        if job is None:
            return None
        self._launched += 1
        command = command_of(job, self._options, self._folder / f"{job.tag}.json", self._cores if whole and job.alone else self._half)
        return Process(job, command, environment_of(job, self.name, self._options, self._folder / "caches"), self._folder)


def _say(device: str, job: Job, found: Sequence[dict[str, Any]], start: float, end: float) -> None:
    failed = sum(row["kind"] == "failure" for row in found)
    took = f"{start:.0f} to {end:.0f} s ({end - start:.0f} s, guess {job.seconds:.0f} s)"
    print(f"device {device or 'default'}: {job.tag}: {took}, {len(found)} rows" + (f", {failed} failures" if failed else ""), flush=True)


def shares(devices: int) -> list[list[int]]:
    """This process' processors in equal parts, one for each device; those that are threads of one core side by side."""
    found = sorted(os.sched_getaffinity(0), key=lambda one: (_core(one), one)) if hasattr(os, "sched_getaffinity") else []
    each = len(found) // devices
    return [found[at * each : (at + 1) * each] for at in range(devices)]


def _core(processor: int) -> int:
    """The first thread of the same core."""
    with suppress(OSError):
        text = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text()
        if (match := re.match(r"\d+", text)) is not None:
            return int(match[0])
    return processor
