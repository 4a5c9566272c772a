"""The Triton step operations on CUDA, against the torch twin on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.launch import TritonLauncher, launch_road
from rung.runner.ops import TorchStepOps, TritonStepOps, default_ops, triton_ops
from tests.gpu.sync_debug import no_waiting
from tests.runner.decode_worlds import DecodeWorld, draw
from tests.runner.step_worlds import LARGE, SMALL, TINY, RandomBatch, Sizes, World, differences, torch_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = pytest.mark.parametrize("sizes", [SMALL, TINY, LARGE], ids=["small", "tiny", "large"])


@SIZES
def test_random_batches_equal_the_torch_twin(sizes: Sizes) -> None:
    rng = np.random.default_rng(sizes.slots)
    world, oracle = World(TritonStepOps(), sizes, "cuda"), torch_world(sizes)
    for number in range(200):
        assert differences(world, oracle, RandomBatch.draw(rng, sizes)) == [], f"batch {number}"


@SIZES
def test_a_captured_step_serves_other_batches(sizes: Sizes) -> None:
    """Lengths are read on the device: one capture at the full extents, replayed with batches of every kind."""
    rng = np.random.default_rng(1)
    world, oracle = World(TritonStepOps(), sizes, "cuda"), torch_world(sizes)
    world.load(RandomBatch.draw(rng, sizes))
    world.step(sizes.rows, sizes.slots)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.step(sizes.rows, sizes.slots)
    for number in range(50):
        batch = RandomBatch.draw(rng, sizes)
        world.load(batch)
        graph.replay()
        oracle.load(batch)
        oracle.step(sizes.rows, sizes.slots)
        assert world.differences(oracle) == [], f"batch {number}"


def test_decode_operations_equal_the_torch_twin() -> None:
    rng = np.random.default_rng(4)
    world, oracle = DecodeWorld(TritonStepOps(), "cuda"), DecodeWorld(TorchStepOps())
    for number in range(200):
        contents, rows = draw(rng)
        for one in (world, oracle):
            one.load(contents)
            one.step(rows)
        assert world.differences(oracle) == [], f"batch {number}"


@pytest.mark.parametrize("vocab", [128256, 50257])  # loads of 16 bytes, and of single numbers
@pytest.mark.parametrize("rows", [1, 17, 100])
def test_a_pick_of_rows_that_hold_their_best_many_times(rows: int, vocab: int) -> None:
    world = DecodeWorld(TritonStepOps(), "cuda")
    world.sampling.temperature[1] = 0.8
    scores = torch.randint(-9, 9, (rows + 3, vocab), device="cuda").bfloat16()
    scores[rows, -1], scores[rows + 1], scores[rows + 2, ::3] = torch.nan, -torch.inf, -torch.inf
    idx = torch.arange(rows + 3, device="cuda").remainder(3)
    args = scores, idx, torch.arange(rows + 3, dtype=torch.int32, device="cuda"), world.sampling
    found, wanted = (ops.decode.pick(*args, any_random=True) for ops in (TritonStepOps(), TorchStepOps()))
    greedy = idx != 1
    assert torch.equal(found[greedy], wanted[greedy])
    assert (found != wanted).sum() <= 1  # the last bits of noise


@pytest.mark.skipif(launch_road() != "prebound", reason=launch_road())
def test_nothing_compiles_or_waits_when_counts_change() -> None:
    def compiled() -> int:
        return sum(len(found.loaded) for found in vars(triton_ops).values() if isinstance(found, TritonLauncher))

    rng = np.random.default_rng(2)
    world = World(TritonStepOps(), SMALL, "cuda")
    world.load(RandomBatch.draw(rng, SMALL))
    world.step(SMALL.rows, SMALL.slots)
    before = compiled()
    with no_waiting():
        for rows, requests in ((1, 1), (2, 1), (16, 2), (17, 3), (128, 12), (150, 13)):
            world.step(rows, requests)
    assert before > 0
    assert compiled() == before


def test_cuda_gets_the_triton_operations() -> None:
    ops, why = default_ops(torch.device("cuda"))
    assert isinstance(ops, TritonStepOps)
    assert why == "triton"
