"""Launches written down and repeated, over a driver that records what it is given."""

from __future__ import annotations

from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from rung.counters import Count, Counters
from rung.launch import RepeatedLaunches, TritonLauncher, Workspace, record_launches, workspace
from rung.launch.record import current_record
from rung.torch_compat import TorchDispatchMode
from tests.launch.fakes import FakeDriver, FakeTensor, launcher_of

X, OUT = FakeTensor(4096), FakeTensor(8192)


def test_a_repetition_launches_what_was_launched(launcher: TritonLauncher, driver: FakeDriver) -> None:
    with record_launches(Workspace()) as record:
        launcher.run((5, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
        launcher.run((6, 2, 1), OUT, X, 8, 3, 1.5, BLOCK=64)  # the same image, so the same parameter bytes
        launcher.run((5, 1, 1), X, OUT, 7, 1, 0.5, BLOCK=64)
    assert (len(record), record.why_not) == (3, None)
    repeat = record.repeat()
    launcher.run((9, 1, 1), FakeTensor(64), OUT, 1, 3, 9.0, BLOCK=64)  # leaves its own in them
    first = driver.launches[:3]
    driver.launches.clear()
    repeat()
    assert driver.launches == first


def test_a_repetition_is_for_the_stream_of_its_time(launcher: TritonLauncher, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [5]
    monkeypatch.setattr(driver, "stream_calls", lambda: (lambda: 0, lambda ordinal: streams[0]))
    with record_launches(Workspace()) as record:
        launcher.run((5, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    streams[0] = 6
    record.repeat()()
    assert [one.stream for one in driver.launches] == [5, 6]


def test_a_repetition_makes_its_device_the_current_one(launcher: TritonLauncher, driver: FakeDriver) -> None:
    with record_launches(Workspace()) as record:
        launcher.run((5, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    driver.current = 3
    seen: list[int] = []
    record._bound = [(*one[:4], lambda x, y, z, stream: seen.append(driver.current), *one[5:]) for one in record._bound]
    record.repeat()()
    assert (seen, driver.current) == ([0], 3)


def test_a_key_is_run_once_and_then_repeated(launcher: TritonLauncher, driver: FakeDriver) -> None:
    ran: list[int] = []
    counters = Counters()
    repeated = RepeatedLaunches(2, counters)

    def run(count: int) -> None:
        ran.append(count)
        launcher.run((count, 1, 1), X, OUT, count, 3, 0.5, BLOCK=64)

    for count in (1, 2, 1, 2, 2, 3, 2, 1):
        repeated.run(count, partial(run, count))
    assert ran == [1, 2, 3, 1]  # the third key took the place of the first
    assert [one.grid[0] for one in driver.launches] == [1, 2, 1, 2, 2, 3, 2, 1]
    assert len(repeated) == 2
    assert (counters[Count.REPEATED_INPUTS], counters[Count.RECORDED_INPUTS], counters[Count.PYTHON_INPUTS]) == (4, 4, 0)


def test_what_cannot_be_repeated_runs_each_time(launcher: TritonLauncher) -> None:
    ran: list[int] = []
    counters = Counters()
    repeated, other = RepeatedLaunches(2, counters), (FakeTensor(4096, ordinal=1), FakeTensor(8192, ordinal=1), 7, 3, 0.5)

    def run() -> None:
        ran.append(1)
        launcher.run((5, 1, 1), *other, BLOCK=64)

    for _ in range(3):
        repeated.run("key", run)
    assert (len(ran), len(repeated), counters[Count.PYTHON_INPUTS]) == (3, 0, 3)
    assert repeated.why_not


def test_nothing_is_written_down_elsewhere(launcher: TritonLauncher) -> None:
    with record_launches(Workspace()) as record:
        thread = Thread(target=launcher.run, args=((5, 1, 1), X, OUT, 7, 3, 0.5), kwargs={"BLOCK": 64})
        thread.start()
        thread.join()
    launcher.run((5, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    assert len(record) == 0
    assert current_record.get() is None


REFUSED = {
    "another device": ((FakeTensor(4096, ordinal=1), FakeTensor(8192, ordinal=1), 7, 3, 0.5),),
    "numbers that became wider": ((X, OUT, 7, 3, 0.5), (X, OUT, 2**31, 3, 0.5)),
}


@pytest.mark.parametrize("calls", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_repeated_is_launched_and_said(launcher: TritonLauncher, driver: FakeDriver, calls: Any) -> None:
    with record_launches(Workspace()) as record:
        for arguments in calls:
            launcher.run((5, 1, 1), *arguments, BLOCK=64)
    assert len(driver.launches) == len(calls)
    assert record.why_not is not None


def test_launches_of_two_devices_are_no_record(launcher: TritonLauncher, driver: FakeDriver) -> None:
    with record_launches(Workspace()) as record:
        launcher.run((5, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
        driver.current = 1
        launcher.run((5, 1, 1), FakeTensor(4096, ordinal=1), FakeTensor(8192, ordinal=1), 7, 3, 0.5, BLOCK=64)
    assert record.why_not is not None
    assert "two devices" in record.why_not


def test_tritons_own_launcher_is_repeated_with_its_arguments() -> None:
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *values, **named: launched.append((grid, values, named))

    launcher = launcher_of(Kernel())
    with record_launches(Workspace()) as record:
        launcher.run((5, 1, 1), X, OUT, BLOCK=64)
    record.repeat()()
    assert launched == [((5, 1, 1), (X, OUT), {"BLOCK": 64})] * 2


def test_a_break_that_launches_nothing_repeats_nothing() -> None:
    with record_launches(Workspace()) as record:
        pass
    assert record.why_not is None
    record.repeat()()


def test_workspaces_of_breaks_lie_over_each_other_and_those_of_one_do_not() -> None:
    memory, place = Workspace(), (torch.float32, torch.device("cpu"))
    with record_launches(memory):
        big, first = workspace((100, 3), *place), workspace((4,), *place)
    with record_launches(memory):
        second = workspace((100, 3), *place)
    assert (big.shape, big.dtype, big.is_contiguous()) == ((100, 3), torch.float32, True)
    assert first.data_ptr() >= big.data_ptr() + big.nbytes or first.data_ptr() + first.nbytes <= big.data_ptr()
    with record_launches(memory):
        again = workspace((4,), *place)
    assert again.data_ptr() == second.data_ptr()
    held = memory.nbytes
    for _ in range(50):
        with record_launches(memory):
            workspace((100, 3), *place)
            workspace((4,), *place)
    assert memory.nbytes == held


def test_memory_that_was_lent_is_kept_and_larger_one_is_added() -> None:
    memory, place = Workspace(), (torch.float32, torch.device("cpu"))
    with record_launches(memory):
        small = workspace((64,), *place)
    small.fill_(1)
    with record_launches(memory):
        workspace((640,), *place).fill_(2)
    assert small.eq(1).all()
    assert memory.nbytes == 256 + 2560
    memory.release()
    assert memory.nbytes == 0


def test_a_workspace_outside_of_a_record_is_the_allocators_own() -> None:
    first, second = (workspace((4, 2), torch.float32, torch.device("cpu")) for _ in range(2))
    assert first.shape == (4, 2)
    assert first.data_ptr() != second.data_ptr()


def test_a_mode_that_looks_for_other_work_does_not_see_workspaces() -> None:
    seen: list[Any] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with record_launches(Workspace()), Look():  # type: ignore[no-untyped-call]
        workspace((4, 2), torch.float32, torch.device("cpu"))
    assert seen == []
