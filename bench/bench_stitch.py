"""What the compiled road costs by itself: a stitched plan of 33 pieces that do nothing, and the checked entry of a wrapped module.

make bench ARGS="-k stitch"
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

import rung
from rung.compile.arguments import dynamic_dims, leaves
from rung.compile.compiled import CompiledFunction
from rung.compile.entry import Entry
from rung.compile.paths import Path
from rung.compile.plan import CompilePlan, Step, TensorSpec
from rung.compile.report import CompileReport
from rung.compile.trace import trace
from rung.compile.variant import Variant
from rung.config import CompileConfig

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


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class Layer(nn.Module):
    """As many submodules, parameters and numbers as a layer of a Llama has, on tensors of 4 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("q", "k", "v", "o")})
        self.mlp = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("gate", "up", "down")})
        self.scaling, self.heads = 0.5, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention["o"](self.attention["q"](y) * self.scaling + self.attention["k"](y) + self.attention["v"](y) * self.heads)
        y = self.norms[1](x)
        return x + self.mlp["down"](torch.relu(self.mlp["gate"](y)) * self.mlp["up"](y))


def decoder() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(PIECES - 1))).eval().requires_grad_(False)


def guarded_no_op() -> tuple[Entry, nn.Module]:
    """The entry of a decoder of 32 layers with all of its guards, around 33 pieces that do nothing."""
    module = decoder()
    arguments = {"input": torch.zeros(8, 4)}
    guards = trace(module.forward, arguments, {"input": {0: "rows"}}).guards
    plan = no_op_plan(PIECES).plan
    path = Path("input")
    plan = replace(plan, guards=guards, inputs=(path,), tensors=((path, plan.tensors[0][1]),), template={"kind": "output", "index": 0})
    entry = Entry(module.forward, CompileConfig(dynamic={"input": {0: "rows"}}))
    found = leaves(arguments)
    variant = Variant(CompiledFunction(plan, [no_op], {}), CompileReport(), found, module.forward)
    key = entry._key(found, dynamic_dims(module.forward, found, entry.config.dynamic))
    entry.variants[(*key, 0)] = variant
    return entry, module


def test_guarded_call_of_33_pieces(benchmark: BenchmarkFixture) -> None:
    entry, module = guarded_no_op()
    module.__dict__["forward"] = entry
    x = torch.zeros(8, 4)
    with torch.no_grad():
        assert module(x) is x
        assert entry._fast is not None
        assert benchmark(module, x) is x


@pytest.mark.parametrize("guards", ["all", "without modules", "none"])
def test_torch_compile_of_the_same_module(benchmark: BenchmarkFixture, guards: str) -> None:
    """Dynamo's own call: its checks, then a graph that does nothing."""
    skip = {"without modules": "skip_guard_on_all_nn_modules_unsafe", "none": "skip_all_guards_unsafe"}.get(guards)
    options = {} if skip is None else {"options": {"guard_filter_fn": getattr(torch.compiler, skip)}}
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        return lambda *values: (values[-1],)

    module = torch.compile(decoder(), backend=backend, dynamic=False, **options)
    x = torch.zeros(8, 4)
    with torch.no_grad():
        module(x)
        benchmark(module, x)


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
