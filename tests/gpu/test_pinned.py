"""Staged writes whose kernel reads pinned host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.counters import Count, Counters
from rung.runner.ops import default_ops
from rung.runner.ops.torch_ops import TorchStepOps
from rung.runner.pinned import pinned_pool
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice
from tests.gpu.sync_debug import no_waiting

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def test_device_reads_pinned_memory_at_the_address_of_the_host() -> None:
    pool = pinned_pool(CUDA)
    assert pool is not None
    with pool.lend(np.arange(16, dtype=np.uint8)) as mapped:
        assert mapped.device == CUDA
        doubled = mapped * 2
    assert doubled.tolist() == list(range(0, 32, 2))


@pytest.mark.parametrize("kind", ["default", "torch"])
def test_writes_of_steps_in_flight_are_applied_without_copies(kind: str) -> None:
    ops = default_ops(CUDA)[0] if kind == "default" else TorchStepOps()
    counters = Counters()
    target = torch.zeros(64, 4096, dtype=torch.int32, device=CUDA)
    staged = StagedWrites(target, HostToDevice(CUDA, counters), ops)
    expected = np.zeros((64, 4096), np.int32)
    staged.stage(0, 0, [0])
    staged.apply()  # kernels are loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # the device is busy: nothing is read before the next ones are staged
    with no_waiting():
        for step in range(1, 33):
            values = list(range(step, step + 17 * step))
            staged.stage(step, 3, values)
            staged.stage(step, 0, [step])
            expected[step, 3 : 3 + len(values)], expected[step, 0] = values, step
            staged.apply()
    assert (target.cpu().numpy() == expected).all()
    assert counters[Count.HOST_TO_DEVICE_COPIES] == 0
