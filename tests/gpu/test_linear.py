"""Joined products on the device against float64, in and out of CUDA graphs.

The kernels start before their predecessors end, so chains of them are compared with the same chain run with a wait after each op."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rung
from rung.models import quantize_fp8
from rung.models.config import LlamaConfig
from rung.models.llama import LlamaMLP, RMSNorm
from rung.models.random import SHAPES
from rung.passes.ir import IR_OPS, LINEAR, LINEAR_NORM_LINEAR, IROp
from rung.passes.kernels.tiles import tiles_for
from tests.gpu.sync_debug import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = (0, 1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 64, 65, 128, 255, 256, 257, 700)
CUDA = torch.device("cuda")
OPS = [op for op in IR_OPS if op.providers]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tiles were chosen for compute capability 9.0")


def flat(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm().clamp_min(1e-30)) if exact.numel() else 0.0


def exact(op: IROp, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """In float64; e4m3 operations are what their bodies say in float32."""
    if op.name.startswith("fp8"):
        return flat(op.body(*args))
    return flat(op.body(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args)))


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * scale).bfloat16()


def layer(rows: int, shape: LlamaConfig, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of the op between attention and the down projection."""
    torch.manual_seed(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    first = bf16(rows, shape.query_size), bf16(hidden, shape.query_size, scale=hidden**-0.5), None, bf16(rows, hidden)
    return *first, bf16(hidden), 1e-5, bf16(2 * inner, hidden, scale=hidden**-0.5), None, "silu"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("rows", ROWS)
def test_provider_equals_float64(op: IROp, rows: int) -> None:
    assert op.sample is not None
    args = op.sample(rows, torch.bfloat16, CUDA)
    provider, refused = op.choose(*args)
    assert provider is not None, refused
    for result, wanted in zip(flat(provider.run(*args)), exact(op, args), strict=True):
        assert result.dtype == (wanted.dtype if op.name.startswith("fp8") else torch.bfloat16)
        assert result.shape == wanted.shape
        assert error(result, wanted.double()) < op.tolerance[torch.bfloat16]


@pytest.mark.parametrize("target", ["smollm2-135m", "llama-8b"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 32, 64, 96, 256])
def test_shapes_of_models(target: str, rows: int) -> None:
    args = layer(rows, SHAPES[target])
    for result, wanted in zip(torch.ops.rung.linear_norm_linear(*args), exact(LINEAR_NORM_LINEAR, args), strict=True):
        assert error(result, wanted) < 1e-2


@pytest.mark.parametrize("shape", [(1, 40, 24), (3, 40, 24), (1, 584, 577), (2, 584, 577), (4, 1000, 333), (17, 1000, 333), (64, 72, 65)])
def test_sizes_that_no_tile_divides(shape: tuple[int, int, int]) -> None:
    rows, k, n = shape
    args = bf16(rows, k), bf16(n, k, scale=k**-0.5), bf16(n), ""
    assert error(torch.ops.rung.linear(*args), exact(LINEAR, args)[0]) < 1e-2


@pytest.mark.parametrize("rows", [2, 4, 5])
def test_strided_rows(rows: int) -> None:
    args = bf16(rows, 700)[:, 60:636], bf16(64, 576, scale=0.04), None, ""
    assert error(torch.ops.rung.linear(*args), exact(LINEAR, args)[0]) < 1e-2


class Chain:
    """Layers behind each other, each the op between attention and MLP and the one between MLP and the next attention."""

    def __init__(self, rows: int, target: str, depth: int) -> None:
        shape = SHAPES[target]
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.x = bf16(rows, shape.query_size)
        self.residual = bf16(rows, hidden)
        self.layers = [
            (
                layer(0, shape, seed),
                (bf16(hidden, inner, scale=inner**-0.5), bf16(hidden), bf16(shape.query_size, hidden, scale=hidden**-0.5)),
            )
            for seed in range(depth)
        ]

    def __call__(self, *, wait: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.x.clone(), self.residual
        for (_, o, _, _, norm, epsilon, gate_up, _, _), (down, next_norm, qkv) in self.layers:
            middle, residual = torch.ops.rung.linear_norm_linear(x, o, None, residual, norm, epsilon, gate_up, None, "silu")
            if wait:
                torch.cuda.synchronize()
            x, residual = torch.ops.rung.linear_norm_linear(middle, down, None, residual, next_norm, epsilon, qkv, None, "")
            if wait:
                torch.cuda.synchronize()
        return x * 2, residual


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 24, 64, 100, 256, 300])
def test_chain_in_a_graph_equals_the_chain_with_waits(rows: int) -> None:
    chain = Chain(rows, "smollm2-135m", 12)
    wanted = chain(wait=True)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = chain()
    for _ in range(20):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        for result, expected in zip(found, wanted, strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
def test_large_chain_in_a_graph_equals_the_chain_with_waits(rows: int) -> None:
    chain = Chain(rows, "llama-8b", 2)
    wanted = chain(wait=True)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = chain()
    for _ in range(5):
        graph.replay()
    assert all(torch.equal(result, expected) for result, expected in zip(found, wanted, strict=True))


def test_two_streams_do_not_disturb_each_other() -> None:
    chain = Chain(8, "smollm2-135m", 6)
    wanted = chain(wait=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for _ in range(10):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(chain())
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for results in found for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("rows", [2, 3, 4, 16, 17, 64, 256])
def test_rows_do_not_reach_each_other(rows: int) -> None:
    args = list(layer(rows, SHAPES["smollm2-135m"]))
    before = torch.ops.rung.linear_norm_linear(*args)
    for index in (0, 3):
        args[index] = args[index].clone()
        args[index][rows // 2 :] = float("nan")
    after = torch.ops.rung.linear_norm_linear(*args)
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[: rows // 2], second[: rows // 2])
        assert second[rows // 2 :].isnan().all()


def test_weights_written_just_before_are_the_ones_used() -> None:
    args = list(layer(1, SHAPES["smollm2-135m"]))
    torch.ops.rung.linear_norm_linear(*args)
    new = [arg * 3 if isinstance(arg, torch.Tensor) else arg for arg in args]
    wanted = torch.ops.rung.linear_norm_linear(*new)
    torch.cuda.synchronize()
    for index in (6, 4, 1, 0, 3):
        args[index].copy_(new[index])
    found = torch.ops.rung.linear_norm_linear(*args)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_calls_do_not_wait_for_the_device() -> None:
    args = layer(8, SHAPES["smollm2-135m"])
    torch.ops.rung.linear_norm_linear(*args)
    with no_waiting():
        torch.ops.rung.linear_norm_linear(*args)


def test_every_size_up_to_the_largest_has_one_answer() -> None:
    found = {rows: tiles_for(rows, 4096, 4096, splittable=True) for rows in range(1, 600)}
    assert found[1] is not None
    assert found[599] is None


class Block(nn.Module):
    """What lies between two attentions."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.o_proj = nn.Linear(shape.query_size, shape.hidden_size, bias=False)
        self.norm = RMSNorm(shape.hidden_size, 1e-5)
        self.mlp = LlamaMLP(shape)
        self.next_norm = RMSNorm(shape.hidden_size, 1e-5)
        self.qkv_proj = nn.Linear(shape.hidden_size, shape.query_size, bias=True)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.o_proj(x) + residual
        residual = self.mlp(self.norm(residual)) + residual
        return self.qkv_proj(self.next_norm(residual)), residual


def test_compiled_block_joins_its_products() -> None:
    torch.manual_seed(0)
    block = Block(SHAPES["tiny"])
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    block.to(CUDA, torch.bfloat16)
    reference = copy.deepcopy(block).double()
    module = rung.wrap(block, dynamic={"x": {0: "rows"}, "residual": {0: "rows"}})
    for rows in (1, 5, 64, 300):
        x, residual = bf16(rows, 64), bf16(rows, 64)
        with torch.no_grad():
            for result, wanted in zip(module(x, residual), reference(x.double(), residual.double()), strict=True):
                assert error(result, wanted) < 1.5e-2
    (passes,) = module.rung.report()[0]["passes"]
    assert passes["projections"]["linear_norm_linear"] == 2
    assert [name.partition(" (")[0] for name in passes["lowering"]] == ["linear_norm_linear"] * 2


class Apart(nn.Module):
    """What lies between two attentions of an unmodified model."""

    def __init__(self, size: int = 128, inner: int = 256) -> None:
        super().__init__()
        self.o_proj, self.q_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size)
        self.k_proj, self.v_proj = nn.Linear(size, size // 4), nn.Linear(size, size // 4)
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.norm, self.next_norm = RMSNorm(size, 1e-5), RMSNorm(size, 1e-5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual = self.o_proj(x) + residual
        normed = self.norm(residual)
        residual = self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed)) + residual
        normed = self.next_norm(residual)
        return self.q_proj(normed), self.k_proj(normed), self.v_proj(normed), residual


@pytest.mark.parametrize("scheme", ["", "per_token", "per_tensor"])
def test_compiled_products_apart_meet_their_siblings(scheme: str) -> None:
    torch.manual_seed(0)
    module = Apart()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    module.to(CUDA, torch.bfloat16)
    reference: nn.Module = copy.deepcopy(module).double()
    if scheme:
        names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        scales = dict.fromkeys(names, 0.02) if scheme == "per_tensor" else None
        quantize_fp8(module, scheme, input_scales=scales)  # type: ignore[arg-type]
        reference = copy.deepcopy(module)  # eager, by the reference operations
    compiled = rung.wrap(module, dynamic={"x": {0: "rows"}, "residual": {0: "rows"}})
    for rows in (1, 5, 64, 300):
        x, residual = bf16(rows, 128), bf16(rows, 128)
        with torch.no_grad():
            wanted = reference(x, residual) if scheme else reference(x.double(), residual.double())
            for result, exact_result in zip(compiled(x, residual), wanted, strict=True):
                assert error(result, exact_result.double()) < (6e-2 if scheme else 1.5e-2)
    (passes,) = compiled.rung.report()[0]["passes"]
    prefix = "fp8_" if scheme else ""
    assert [passes["siblings"][f"{prefix}{name}"] for name in ("linear_three", "linear_gated")] == [1, 1]
    assert passes["projections"][f"{prefix}linear_norm"] == 2
