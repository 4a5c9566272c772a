"""What the compiled road costs by itself: a stitched plan of 33 pieces that do nothing, and the checked entry of a wrapped module.

make bench ARGS="-k stitch"
"""

from __future__ import annotations

from typing import Any

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

import rung
from rung.compile.compiled import CompiledFunction
from rung.compile.paths import Path
from rung.compile.plan import CompilePlan, Step, TensorSpec

PIECES = 33


def no_op(values: list[Any]) -> list[Any]:
    return values


def no_op_plan(pieces: int) -> CompiledFunction:
    """x goes through one piece after the other; no value is used twice."""
    x = Path("x")
    spec = TensorSpec("torch.float32", "cpu", ("rows", 4))
    plan = CompilePlan(
        entry="bench",
        inputs=(x,),
        tensors=((x, spec),),
        bounds={"rows": None},
        pieces=(("", ""),),
        steps=tuple(Step(f"piece_{n:02}", (n,), (n + 1,), piece=0) for n in range(pieces)),
        outputs=({"value": pieces},),
        template={"kind": "list", "items": []},
        sources=(),
    )
    return CompiledFunction(plan, [no_op], {})


class Negative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def test_stitched_call_of_33_pieces(benchmark: BenchmarkFixture) -> None:
    stitched = no_op_plan(PIECES).stitched
    x = torch.zeros(8, 4)
    assert benchmark(stitched, x) == [x]


def test_stitched_call_of_one_piece(benchmark: BenchmarkFixture) -> None:
    x = torch.zeros(8, 4)
    assert benchmark(no_op_plan(1).stitched, x) == [x]


def test_wrapped_module_of_one_piece(benchmark: BenchmarkFixture) -> None:
    module = rung.wrap(Negative(), dynamic={"x": {0: "rows"}})
    x = torch.ones(8, 4)
    module(x)
    assert torch.equal(benchmark(module, x), -x)


def test_eager_module_of_one_op(benchmark: BenchmarkFixture) -> None:
    """The same module without rung, to subtract."""
    x = torch.ones(8, 4)
    assert torch.equal(benchmark(Negative(), x), -x)
