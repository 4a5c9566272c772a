"""The wide product on the device: every number of rows that it takes, both dtypes, edges of its tiles, behind kernels that still write."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from rung.passes.kernels import launches
from rung.passes.kernels.launches import Surroundings, Tiles
from rung.passes.kernels.wide import WIDE, why_not_wide, wide_product
from tests.gpu.sync_debug import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
E4M3 = torch.float8_e4m3fn
WAY: dict[str, Any] = {"block_n": 112, "stages": 5, "programmatic": True}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")


def operands(rows: int, n: int, k: int, e4m3: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    """x, weight and their scales."""
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, k, device=CUDA), torch.randn(2 * n, k, device=CUDA) * k**-0.5
    if not e4m3:
        return x.bfloat16(), weight.bfloat16(), None, None
    x_scale, weight_scale = torch.rand(rows, 1, device=CUDA) + 0.5, torch.rand(2 * n, device=CUDA) + 0.5
    return x.to(E4M3), (16 * weight).to(E4M3), x_scale, weight_scale / 16


def meaning(x: torch.Tensor, weight: torch.Tensor, x_scale: Any, weight_scale: Any, activation: str = "silu") -> torch.Tensor:
    product = x.double() @ weight.double().t()
    if x_scale is not None:
        product = product * x_scale.double() * weight_scale.double()
    if not activation:
        return product
    gate, up = product.bfloat16().double().chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return act * up


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(
    ("blocks", "rows"),
    [(1, 1), (1, 33), (1, 64), (1, 65), (1, 100), (1, 128), (2, 130), (2, 129), (2, 200), (2, 255), (2, 256), (2, 300), (1, 300)],
)
def test_equals_the_product(rows: int, blocks: int, e4m3: bool) -> None:
    args = operands(rows, 1792, 4096, e4m3)
    found = wide_product(args[0], args[1], "silu", *args[2:], blocks=blocks, **WAY)
    assert found.shape == (rows, 1792)
    assert error(found, meaning(*args)) < 5e-3


@pytest.mark.parametrize(("n", "k"), [(8, 64), (1000, 4160), (14336, 4096), (120, 48), (448, 200 * 8)])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_edges_of_its_tiles(n: int, k: int, e4m3: bool, activation: str) -> None:
    args = operands(200, n, k, e4m3)
    whole = torch.full((200, n + 8), 7.0, device=CUDA, dtype=torch.bfloat16)
    found = wide_product(args[0], args[1], activation, *args[2:], blocks=2, **WAY)
    whole[:, :n] = found
    assert error(found, meaning(*args, activation)) < 8e-3
    assert bool((whole[:, n:] == 7).all())


@pytest.mark.parametrize(("n", "k"), [(8, 64), (96, 64), (1000, 4160), (6144, 4096), (56, 4096)])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_without_an_activation(n: int, k: int, e4m3: bool, blocks: int) -> None:
    x, weight, x_scale, weight_scale = operands(200, n, k, e4m3)
    weight, weight_scale = weight[:n], None if weight_scale is None else weight_scale[:n]
    found = wide_product(x, weight, "", x_scale, weight_scale, blocks=blocks, block_n=48, stages=8, programmatic=True)
    assert found.shape == (200, n)
    assert error(found, meaning(x, weight, x_scale, weight_scale, "")) < 5e-3


@pytest.mark.parametrize(("n", "k", "parts"), [(8, 256, 2), (1000, 4160, 3), (4096, 14336, 2), (136, 4096, 4), (4096, 384, 3)])
@pytest.mark.parametrize(("blocks", "rows"), [(1, 70), (1, 200), (2, 209), (2, 256)])
def test_parts_of_k(n: int, k: int, parts: int, blocks: int, rows: int) -> None:
    x, weight, _, _ = operands(rows, n, k, False)
    found = wide_product(x, weight[:n], "", None, None, blocks=blocks, block_n=64, stages=6, programmatic=True, parts=parts)
    assert (found.shape, found.dtype) == ((parts, rows, n), torch.float32)
    bounds = [k // 64 * part // parts * 64 for part in range(parts)] + [k]
    for part in range(parts):
        columns = slice(bounds[part], bounds[part + 1])
        assert error(found[part], meaning(x[:, columns], weight[:n, columns], None, None, "")) < 2e-3, part


def test_one_scale_for_all_rows_and_rows_apart() -> None:
    x, weight, _, weight_scale = operands(130, 1792, 4096, True)
    one = torch.full((1, 1), 0.7, device=CUDA)
    apart = torch.empty(130, 8192, device=CUDA, dtype=E4M3)[:, :4096].copy_(x)
    found = wide_product(apart, weight, "silu", one.expand(130, 1), weight_scale, blocks=2, **WAY)
    assert error(found, meaning(x, weight, one, weight_scale)) < 5e-3


@pytest.mark.parametrize("e4m3", [False, True])
def test_waits_for_the_kernel_that_writes_its_rows(e4m3: bool) -> None:
    """In a graph, behind a product whose result it reads, many times with other rows."""
    first = operands(256, 4096, 4096, False)
    second = operands(256, 14336, 4096, e4m3, seed=1)
    scale = torch.ones(256, 1, device=CUDA)

    def chain() -> torch.Tensor:
        middle = wide_product(*first[:2], "silu", None, None, blocks=2, **WAY)
        rows = middle.to(E4M3) if e4m3 else middle
        return wide_product(rows, second[1], "silu", scale if e4m3 else None, second[3], blocks=2, **WAY)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for draw in range(5):
        first[0].copy_(torch.randn(256, 4096, device=CUDA))
        graph.replay()
        found = out.clone()
        middle = meaning(*first[:2], None, None).bfloat16()
        wanted = meaning(middle.to(E4M3) if e4m3 else middle, second[1], scale if e4m3 else None, second[3])
        assert error(found, wanted) < 2e-2, draw


def test_parts_are_summed_by_the_norm_behind_them() -> None:
    """As in a decoder layer: product, residual and norm, and the next product, with other rows in each replay of a graph."""
    torch.manual_seed(3)
    draw = functools.partial(torch.randn, device=CUDA, dtype=torch.bfloat16)
    x, weight, residual, scale, after = draw(256, 4096), draw(4096, 4096) / 64, draw(256, 4096), draw(4096), draw(28672, 4096) / 64
    args = weight, None, residual, scale, 1e-5, after, None, "silu"
    torch.ops.rung.linear_norm_linear(x, *args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.rung.linear_norm_linear(x, *args)
    for _ in range(5):
        x.copy_(draw(256, 4096))
        graph.replay()
        hidden = (x.double() @ weight.double().t()).bfloat16().double() + residual.double()
        normed = (scale.double() * hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + 1e-5)).bfloat16()
        assert error(found[1], hidden) < 5e-3
        assert error(found[0], meaning(normed, after, None, None)) < 1e-2


def test_replays_are_equal_bit_by_bit() -> None:
    args = operands(256, 14336, 4096, False)
    found = [wide_product(args[0], args[1], "silu", None, None, blocks=2, **WAY) for _ in range(20)]
    assert all(torch.equal(one, found[0]) for one in found)


def test_the_layer_op_takes_it_and_does_not_wait() -> None:
    x, weight, _, _ = operands(256, 14336, 4096, False)
    assert why_not_wide(x, weight, None) is None
    torch.ops.rung.linear(x, weight, None, "silu", False)
    before = len(WIDE.loaded)
    with no_waiting():
        found = torch.ops.rung.linear(x, weight, None, "silu", False)
    assert before >= 1
    assert error(found, meaning(x, weight, None, None)) < 5e-3


def test_a_bias_goes_to_cublas() -> None:
    x, weight, _, _ = operands(256, 14336, 4096, False)
    bias = torch.randn(2 * 14336, device=CUDA).bfloat16()
    found = torch.ops.rung.linear(x, weight, bias, "silu", False)
    gate, up = (x.double() @ weight.double().t() + bias.double()).bfloat16().double().chunk(2, dim=1)
    assert error(found, torch.nn.functional.silu(gate) * up) < 5e-3


def test_no_rows_launch_nothing() -> None:
    x, weight, _, _ = operands(4, 1792, 4096, False)
    tiles = Tiles(block_m=128, block_n=112, block_k=64, num_warps=9, num_stages=5, prefetch=0, wide=2)
    assert launches.product(x[:0], weight, Surroundings(activation="silu"), tiles).shape == (0, 1792)
