"""Lending of pinned buffers, with events that the test decides about."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.runner import pinned
from rung.runner.pinned import PinnedPool


class FakeEvent:
    def __init__(self) -> None:
        self.recorded = 0
        self.done = False

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return self.done


def make() -> tuple[PinnedPool, list[int], list[FakeEvent]]:
    sizes: list[int] = []
    events: list[FakeEvent] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    return PinnedPool(allocate, lambda memory: memory, event), sizes, events


def lend(pool: PinnedPool, value: int, size: int = 8) -> torch.Tensor:
    with pool.lend(np.full(size, value, np.uint8)) as lent:
        assert lent.tolist() == [value] * size
        return lent


def test_buffer_whose_reader_is_not_done_is_not_lent_again() -> None:
    pool, _, events = make()
    first = lend(pool, 1)
    assert events[0].recorded == 1
    second = lend(pool, 2)
    assert (first.tolist(), second.data_ptr() == first.data_ptr()) == ([1] * 8, False)
    events[1].done = True
    assert lend(pool, 3).data_ptr() == second.data_ptr()
    assert first.tolist() == [1] * 8


def test_steady_steps_allocate_nothing_and_longer_data_gets_a_power_of_two() -> None:
    pool, sizes, events = make()
    for step in range(10):
        lend(pool, step)
        events[0].done = True
    assert sizes == [4096]
    lend(pool, 1, 5000)
    assert sizes == [4096, 8192]


def test_buffer_that_its_reader_never_got_is_dropped() -> None:
    pool, sizes, _ = make()
    try:
        with pool.lend(np.zeros(4, np.uint8)):
            raise RuntimeError
    except RuntimeError:
        pass
    lend(pool, 1)
    assert len(sizes) == 2


def test_a_rehearsal_without_memory_shares_none_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "pinned_pool", lambda device: make()[0])
    monkeypatch.setattr(pinned, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    with torch._subclasses.FakeTensorMode():
        tensor, seen = pinned.shared_tensor((2, 3), torch.int64, torch.device("meta"))
    assert (tensor.shape, tensor.dtype, seen) == ((2, 3), torch.int64, None)
