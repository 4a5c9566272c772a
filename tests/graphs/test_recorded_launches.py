"""Triton kernels of ours on the recorded backend; they run in Triton's interpreter, which `test_step_ops_interpreted` starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rung.graphs import Descriptor, GraphMode
from rung.launch import TritonLauncher, launch_road
from tests.graphs.toys import brk, make_manager, only

pytestmark = pytest.mark.skipif("interpreter" not in launch_road(), reason="needs Triton's interpreter (TRITON_INTERPRET=1)")

ADD = TritonLauncher("tests.launch.toy_kernels", "add_kernel")
FULL_4 = Descriptor(mode=GraphMode.FULL, num_tokens=4)


def test_a_launch_is_replayed_at_the_addresses_of_the_capture() -> None:
    calls = []

    def add_twice(x: torch.Tensor) -> Sequence[Any]:
        calls.append(len(x))
        out = torch.zeros_like(x)
        ADD.run((1, 1, 1), x, out, x.numel(), BLOCK=64)
        ADD.run((1, 1, 1), x, out, x.numel(), BLOCK=64)
        return (out + 1,)

    manager = make_manager(only(brk("twice", add_twice)))
    manager.capture([FULL_4])
    ran = len(calls)
    (buffer,) = manager.inputs
    for value in (1.0, 5.0):
        buffer.view({"tokens": 4}).fill_(value)
        (out,) = manager.run(FULL_4).clone()
        assert torch.equal(out, torch.full_like(out, 2 * value + 1))
    assert len(calls) == ran
    nodes = manager.program(FULL_4).nodes
    assert nodes is not None
    assert nodes.kernels == 4  # zeros, two launches, + 1


def test_numbers_of_a_launch_are_frozen() -> None:
    counts = [4]

    def add(x: torch.Tensor) -> Sequence[Any]:
        out = torch.zeros_like(x)
        ADD.run((1, 1, 1), x, out, counts[0], BLOCK=64)
        return (out,)

    manager = make_manager(only(brk("add", add)))
    manager.capture([FULL_4])
    counts[0] = 0
    (buffer,) = manager.inputs
    buffer.view({"tokens": 4}).fill_(3.0)
    (out,) = manager.run(FULL_4).clone()
    assert out.flatten()[:4].tolist() == [3.0] * 4
