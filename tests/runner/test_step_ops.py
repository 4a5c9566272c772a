"""The step operations against the torch twin. Triton's run in its interpreter, where `test_step_ops_interpreted` starts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.runner.ops import StepOps, TorchStepOps, default_ops
from tests.runner.step_worlds import LARGE, SMALL, TINY, RandomBatch, Sizes, World, differences, torch_world


# The interpreter is slow: hundreds of batches run on CUDA.
@pytest.mark.parametrize(("sizes", "count"), [(SMALL, 40), (TINY, 20), (LARGE, 3)], ids=["small", "tiny", "large"])
def test_random_batches_equal_the_torch_twin(triton_ops: StepOps, sizes: Sizes, count: int) -> None:
    rng = np.random.default_rng(sizes.slots)
    world, oracle = World(triton_ops, sizes), torch_world(sizes)
    for number in range(count):
        assert differences(world, oracle, RandomBatch.draw(rng, sizes)) == [], f"batch {number}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_scatter_keeps_the_type(step_ops: StepOps, dtype: torch.dtype) -> None:
    target = torch.zeros(2, 3, dtype=dtype)
    step_ops.scatter(target, torch.tensor([5, 0]), torch.tensor([7, 2**24 - 1], dtype=dtype))
    assert target.tolist() == [[2**24 - 1, 0, 0], [0, 0, 7]]


def test_random_batches_reach_every_branch() -> None:
    """The comparison would say little if no batch had, say, a request at its full length."""
    sizes, rng = Sizes(), np.random.default_rng(0)
    seen = dict.fromkeys(
        ("no slot", "short of its prefill", "at its prefill", "past its prefill", "full", "spare rows", "spare requests"), 0
    )
    world = torch_world(sizes)
    for _ in range(50):
        batch = RandomBatch.draw(rng, sizes)
        world.load(batch)
        t = world.tensors
        lens = t["query_start_loc"].diff()
        live = (lens > 0) & (t["idx_mapping"] >= 0)
        slot = t["idx_mapping"][live]
        end = t["num_computed_tokens"][slot] + lens[live]
        seen["no slot"] += int(((lens > 0) & (t["idx_mapping"] < 0)).any())
        seen["short of its prefill"] += int((end < t["prefill_len"][slot]).any())
        seen["at its prefill"] += int((end == t["prefill_len"][slot]).any())
        seen["past its prefill"] += int((end > t["prefill_len"][slot]).any())
        seen["full"] += int((t["total_len"][slot] == sizes.length).any())
        seen["spare rows"] += batch.num_rows > int(lens.sum())
        seen["spare requests"] += batch.num_requests > int((lens > 0).sum())
    assert min(seen.values()) >= 10, seen


def test_the_cpu_gets_the_torch_operations_and_the_reason() -> None:
    ops, why = default_ops(torch.device("cpu"))
    assert isinstance(ops, TorchStepOps)
    assert why == "torch: the step's Triton kernels are for CUDA devices"
