"""Pieces that talk to other ranks: plans and keys differ by the layout of ranks and not by the rank."""

from __future__ import annotations

import datetime
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rung
from rung import torch_compat
from rung.compile.guards import Roots
from rung.compile.trace import trace
from rung.counters import Count
from tests.compile.cases import ROOT, bound, split

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@contextmanager
def ranks(rank: int, count: int, groups: list[list[int]] | None = None) -> Iterator[None]:
    """A process group whose other ranks do not exist; its operations return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    for members in groups or []:
        dist.new_group(members)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1


class Local(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


X = torch.ones(3, 4)
PAIRS, ALTERNATING = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
LAYOUTS: list[Any] = [(1, None), (2, None), (4, None), (4, PAIRS), (4, ALTERNATING)]


def piece_key(module: nn.Module) -> str:
    _, graph = split(module.forward, X)
    (piece,) = graph.pieces
    return piece.key


@pytest.mark.parametrize("module", [Sum(), Local()], ids=["talks", "does not"])
def test_keys_differ_by_layout_where_a_piece_talks(module: nn.Module) -> None:
    keys = []
    for count, groups in LAYOUTS:
        found = set()
        for rank in range(count):
            with ranks(rank, count, groups):
                found.add(piece_key(module))
        assert len(found) == 1, "the key depends on the rank"
        keys += found
    assert len(set(keys)) == (len(LAYOUTS) if isinstance(module, Sum) else 1)


def test_a_plan_serves_no_other_layout() -> None:
    with ranks(0, 2):
        traced = trace(Sum().forward, bound(Sum().forward, (X,)), {}).guards
        local = trace(Local().forward, bound(Local().forward, (X,)), {}).guards
        assert traced.unknown == local.unknown == ()
        assert traced.violation(Roots(Sum().forward)) == ""
    with ranks(1, 2):
        assert traced.violation(Roots(Sum().forward)) == ""
    for count, groups in ((1, None), (4, PAIRS)):
        with ranks(0, count, groups):
            assert "topology'() was" in traced.violation(Roots(Sum().forward))
            assert local.violation(Roots(Local().forward)) == ""


def test_without_process_groups_there_is_no_layout() -> None:
    assert torch_compat.topology() == ()


# --- ranks that exist ----------------------------------------------------------------------------------------------------------------

HIDDEN = 32


class ParallelMLP(nn.Module):
    """Each rank holds some of the hidden columns; the sum over ranks is the whole."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up, down = torch.randn(HIDDEN, 8, generator=generator), torch.randn(8, HIDDEN, generator=generator)
        self.register_buffer("up", up.chunk(count)[rank].clone())
        self.register_buffer("down", down.chunk(count, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ self.up.t()) @ self.down.t()
        if dist.get_world_size() > 1:
            dist.all_reduce(y)
        return y * 2


def work(rank: int, count: int, meeting: str, device_type: str, limit: float, modes: Sequence[str]) -> None:
    """One rank: compare with the whole model in each of `modes`, print a line of JSON a mode and what each part took."""
    start = time.perf_counter()

    def passed(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s {what}", flush=True)  # noqa: T201 - the parent shows it

    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    patience = datetime.timedelta(seconds=limit)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=patience)
    dist.all_reduce(torch.ones(1, device=device))
    passed("the ranks have met")
    whole = ParallelMLP(0, 1)
    for mode in modes:
        wrapped = rung.wrap(ParallelMLP(rank, count).to(device), dynamic={"x": {0: "rows"}}, graphs=mode)
        with torch.no_grad():
            for rows in (5, 2, 5):
                x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
                expected = torch.relu(x @ whole.up.t()) @ whole.down.t() * 2
                torch.testing.assert_close(wrapped(x.to(device)).cpu(), expected, rtol=1e-3, atol=1e-3)
                passed(f"{mode}: {rows} rows")
        (report,) = wrapped.rung.report()
        assert report["guards"]["unknown"] == []
        told = {"mode": mode, "source": report["source"], "compiles": wrapped.rung.counters[Count.INDUCTOR_COMPILES]}
        print(json.dumps(told | {"steps": len(report["steps"]), "seconds": report["seconds"]}), flush=True)  # noqa: T201
        wrapped.rung.release()  # NCCL waits for graphs that hold its collectives when a group is destroyed (pytorch/pytorch#115388)
        passed(f"{mode}: released")
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    passed("end")


def run_ranks(count: int, folder: Path, device_type: str, modes: Sequence[str], *, limit: float) -> list[list[dict[str, Any]]]:
    """What each rank told, a dict a mode. Fails after `limit` seconds, or soon after the first rank that fails, with what the ranks said
    and the stacks of those that still ran."""
    code = (
        "import faulthandler; faulthandler.enable(); import sys, json; from tests.compile.test_distributed import work; "
        "work(**json.loads(sys.argv[1]))"
    )
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        told = {"rank": rank, "count": count, "meeting": str(folder / "meeting")}
        command = [sys.executable, "-c", code, json.dumps(told | {"device_type": device_type, "limit": limit, "modes": [*modes]})]
        with log.open("w") as file:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        late = _wait(processes, limit)
        for process in late:
            process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads
        for process in late:
            process.wait(10)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    pairs = enumerate(zip(processes, logs, strict=True))
    said = "".join(f"\n--- rank {rank}, status {process.returncode}\n{_ends(log.read_text())}" for rank, (process, log) in pairs)
    assert not late, f"{len(late)} of {count} ranks still ran after {limit} s, or after another had failed{said}"
    assert not any(process.returncode for process in processes), said
    return [[json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")] for log in logs]


def _ends(text: str) -> str:
    return text if len(text) < 8000 else f"{text[:4000]}\n...\n{text[-4000:]}"


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> list[subprocess.Popen[bytes]]:
    """The processes that still run at the end of the time, which ends two seconds after one has failed."""
    end = time.monotonic() + limit
    while (running := [process for process in processes if process.poll() is None]) and time.monotonic() < end:
        if any(process.returncode for process in processes):
            end = min(end, time.monotonic() + 2)
        time.sleep(0.1)
    return running


def check_ranks(told: list[list[dict[str, Any]]]) -> None:
    """One rank compiled and in one mode alone; all others took it from the store."""
    first = sorted(modes[0]["source"] for modes in told)
    assert first == ["compiled", *["loaded"] * (len(told) - 1)]
    assert {one["source"] for modes in told for one in modes[1:]} <= {"loaded"}
    assert sum(one["compiles"] for modes in told for one in modes) == 1


@pytest.mark.slow
def test_two_ranks_equal_the_whole_model_and_share_what_one_compiled(tmp_path: Path) -> None:
    check_ranks(run_ranks(2, tmp_path, "cpu", ["none", "piecewise"], limit=120))


def test_ranks_that_hang_are_told_with_their_stacks(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)2 of 2 ranks still ran after 1.0 s.*rank 0.*most recent call first.*rank 1.*most recent"
    ):
        run_ranks(2, tmp_path, "cpu", ["none"], limit=1.0)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0, status 1\n.*the ranks have met.*ConfigError: graphs must be one of"):
        run_ranks(2, tmp_path, "cpu", ["some"], limit=100.0)
