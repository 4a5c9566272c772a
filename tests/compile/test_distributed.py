"""Pieces that talk to other ranks: plans and keys differ by the layout of ranks and not by the rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
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


def work(rank: int, count: int, meeting: str, device_type: str, graphs: str) -> None:
    """One rank: compare with the whole model, print where the plan came from."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    whole = ParallelMLP(0, 1)
    wrapped = rung.wrap(ParallelMLP(rank, count).to(device), dynamic={"x": {0: "rows"}}, graphs=graphs)
    with torch.no_grad():
        for rows in (5, 2, 5):
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
            expected = torch.relu(x @ whole.up.t()) @ whole.down.t() * 2
            torch.testing.assert_close(wrapped(x.to(device)).cpu(), expected, rtol=1e-3, atol=1e-3)
    report = wrapped.rung.report()[0]
    assert report["guards"]["unknown"] == []
    print(report["source"], len(report["steps"]), report["reason"])  # noqa: T201 - the parent reads it
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(count: int, folder: Path, device_type: str, graphs: str = "none") -> list[str]:
    """What each rank printed last."""
    code = "import sys; from tests.compile.test_distributed import work; work(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
    arguments = [str(count), str(folder / "meeting"), device_type, graphs]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [text.strip().splitlines()[-1] for text, _ in outputs]


@pytest.mark.slow
def test_two_ranks_equal_the_whole_model_and_share_what_one_compiled(tmp_path: Path) -> None:
    said = run_ranks(2, tmp_path, "cpu")
    assert sorted(text.split()[0] for text in said) == ["compiled", "loaded"]
