"""The product whose k is shared by a cluster, on the device: every number of rows, both dtypes, edges of its tiles, rows still written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.passes.kernels.wide import split_product
from tests.gpu.test_wide import CUDA, E4M3, error, meaning, operands

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [(64, 2, 9), (256, 2, 5), (192, 2, 7), (128, 2, 9), (256, 1, 5), (256, 4, 4), (64, 2, 5)]  # rows of a block, shares of k, stages
WAY: dict[str, Any] = {"programmatic": True}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")


def plain(rows: int, n: int, k: int, e4m3: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    x, weight, x_scale, weight_scale = operands(rows, -(-n // 2), k, e4m3, seed)
    return x, weight[:n], x_scale, None if weight_scale is None else weight_scale[:n]


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("block_m", "splits", "stages"), SHAPES)
@pytest.mark.parametrize("rows", [1, 17, 40, 64, 65, 128, 129, 200, 255, 256])
def test_equals_the_product(rows: int, block_m: int, splits: int, stages: int, e4m3: bool) -> None:
    if rows > block_m:
        pytest.skip("more rows than a block has")
    args = plain(rows, 1536, 4096, e4m3)
    found = split_product(*args, block_m=block_m, splits=splits, stages=stages, **WAY)
    assert found.shape == (rows, 1536)
    assert error(found, meaning(*args, "")) < 5e-3


@pytest.mark.parametrize(("n", "k"), [(8, 64), (16, 16), (1000, 4160), (4096, 14336), (6144, 4096), (120, 48), (448, 200 * 8)])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("block_m", "splits", "stages"), SHAPES)
def test_edges_of_its_tiles(n: int, k: int, block_m: int, splits: int, stages: int, e4m3: bool) -> None:
    """Shares of k without a step among them."""
    rows = min(200, block_m - 3)
    args = plain(rows, n, k, e4m3)
    found = split_product(*args, block_m=block_m, splits=splits, stages=stages, **WAY)
    assert error(found, meaning(*args, "")) < 8e-3


def test_one_scale_for_all_rows_and_rows_apart() -> None:
    x, weight, _, weight_scale = plain(130, 1792, 4096, True)
    one = torch.full((1, 1), 0.7, device=CUDA)
    apart = torch.empty(130, 8192, device=CUDA, dtype=E4M3)[:, :4096].copy_(x)
    found = split_product(apart, weight, one.expand(130, 1), weight_scale, block_m=256, splits=2, stages=5, **WAY)
    assert error(found, meaning(x, weight, one, weight_scale, "")) < 5e-3


@pytest.mark.parametrize("e4m3", [False, True])
def test_waits_for_the_kernel_that_writes_its_rows(e4m3: bool) -> None:
    """In a graph, behind a product whose result it reads, many times with other rows."""
    first = plain(256, 4096, 4096, False)
    second = plain(256, 4096, 4096, e4m3, seed=1)
    scale = torch.ones(256, 1, device=CUDA)

    def chain() -> torch.Tensor:
        middle = split_product(*first, block_m=256, splits=2, stages=5, **WAY)
        rows = middle.to(E4M3) if e4m3 else middle
        return split_product(rows, second[1], scale if e4m3 else None, second[3], block_m=256, splits=1, stages=5, **WAY)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for draw in range(5):
        first[0].copy_(torch.randn(256, 4096, device=CUDA))
        graph.replay()
        found = out.clone()
        middle = meaning(*first, "").bfloat16()
        wanted = meaning(middle.to(E4M3) if e4m3 else middle, second[1], scale if e4m3 else None, second[3], "")
        assert error(found, wanted) < 2e-2, draw


@pytest.mark.parametrize(
    ("rows", "n", "k", "block_m", "stages"), [(256, 4096, 14336, 256, 5), (61, 6144, 4096, 64, 5), (90, 8192, 4096, 128, 9)]
)
def test_calls_are_equal_bit_by_bit(rows: int, n: int, k: int, block_m: int, stages: int) -> None:
    """Also where blocks share a multiprocessor, or come in rounds: warpgroups that run ahead of each other wait for the right stage."""
    args = plain(rows, n, k, False)
    found = [split_product(*args, block_m=block_m, splits=2, stages=stages, **WAY) for _ in range(60)]
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_nan_of_a_row_stays_in_that_row() -> None:
    args = plain(256, 4096, 4096, False)
    args[0][77, 5] = float("nan")
    found = split_product(*args, block_m=256, splits=2, stages=5, **WAY)
    assert found.isnan().any(1).nonzero().flatten().tolist() == [77]
    assert bool(found[77].isnan().all())
