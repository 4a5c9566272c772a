"""The compiles of `rung precompile`: here, or in child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from rung.errors import CompileError

TARGETS = ("native", "h200", "h100", "a100", "l40s", "b200")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing to compile for one device."""

    target: str
    inputs: str | None
    dtype: str
    sizes: tuple[int, ...]
    place: str = "native"  # one of TARGETS
    requests: tuple[int, ...] = (16, 64)  # request slots of the runners whose kernels are built, where the device is not here
    threads: int = 1  # that compile kernels
    maximum: int | None = None  # the largest size that the code serves; None: what the commands take by themselves

    @property
    def label(self) -> str:
        return f"{self.target} for {self.place}" + ("" if self.maximum is None else f", sizes 1 to {self.maximum}")


def run_jobs(jobs: Sequence[Job], *, at_once: int) -> list[dict[str, Any]]:
    """The results of all jobs, with a progress bar on the error stream. A native job runs in this process where it is alone, or one after
    another."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rung.cli.console import console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(err=True), transient=True) as progress:
        task = progress.add_task(jobs[0].label, total=len(jobs))
        if at_once == 1 or len(jobs) == 1:
            results = []
            for job in jobs:
                progress.update(task, description=job.label)
                results += run_here(job) if job.place == "native" else _run_child(job)
                progress.advance(task)
            return results
        with ThreadPoolExecutor(at_once) as pool:
            waiting = {pool.submit(_run_child, job): job for job in jobs}
            for done in as_completed(waiting):
                progress.update(task, description=waiting[done].label, advance=1)
            return [result for future in waiting for result in future.result()]


def run_here(job: Job) -> list[dict[str, Any]]:
    from rung.cli.precompile_work import compile_job

    return compile_job(job)


def _run_child(job: Job) -> list[dict[str, Any]]:
    """Run a job in `rung.cli.precompile_child` with the settings of the store as they are here. Raises `CompileError`."""
    from rung.cache import store_settings

    settings = store_settings()
    given = {
        "RUNG_CACHE_DIR": str(settings.root.absolute()),
        "RUNG_CACHE_BASE": os.pathsep.join(str(base.absolute()) for base in settings.bases),
        "RUNG_CACHE_TRUST": settings.trust,
        "RUNG_CACHE_BYTES": "none" if settings.budget_bytes is None else str(settings.budget_bytes),
    }
    done = subprocess.run(
        [sys.executable, "-m", "rung.cli.precompile_child"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        env={**os.environ, **given, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        why = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
        raise CompileError(f"{job.label}: {why}", hint=next((line for line in lines if line.startswith("hint: ")), "hint: ")[6:])
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results
