from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from rung.errors import KernelArgumentError, LaunchError
from rung.launch.image import KernelImage, Scratch
from rung.launch.kernel import LoadedKernel, PreboundKernel
from tests.launch.fakes import FakeDriver, FakeTensor, driver_for, image_of

PLAIN = image_of("*fp32", "i32", "fp32", "global_scratch", "profile_scratch")


def bound(image: KernelImage, *arguments: object, **named: object) -> tuple[PreboundKernel, FakeDriver]:
    driver = driver_for(image)
    return PreboundKernel(LoadedKernel(image, 0, driver), arguments, (2, 3, 4), **named), driver  # type: ignore[arg-type]


def test_a_launch_passes_grid_stream_and_bytes() -> None:
    kernel, driver = bound(PLAIN, FakeTensor(4096), 7, 0.5)
    kernel.launch(77)
    (launched,) = driver.launches
    assert (launched.function, launched.grid, launched.stream) == ("kernel", (2, 3, 4), 77)
    assert launched.parameters == (struct.pack("<Q", 4096), struct.pack("<i", 7), struct.pack("<f", 0.5), bytes(8), bytes(8))


def test_patching_keeps_the_addresses_of_the_table() -> None:
    kernel, driver = bound(PLAIN, FakeTensor(4096), 7, 0.5)
    kernel.launch(1)
    kernel.set(0, FakeTensor(8192))
    kernel.set(1, -2)
    kernel.launch(1)
    first, second = driver.launches
    assert second.parameters[:2] == (struct.pack("<Q", 8192), struct.pack("<i", -2))
    assert first.addresses == second.addresses


def test_addresses_may_be_numbers() -> None:
    kernel, driver = bound(PLAIN, 2**40, 7, 0.5)
    kernel.launch(1)
    assert driver.launches[0].parameters[0] == struct.pack("<Q", 2**40)


def test_attributes_come_from_the_image() -> None:
    image = image_of("*fp32", num_warps=8, shared_bytes=1000, cluster=(2, 1, 1), cooperative=True, programmatic=True)
    kernel, driver = bound(image, 0)
    kernel.launch(1)
    attributes = driver.launches[0].attributes
    assert (attributes.block, attributes.shared_bytes, attributes.cluster) == ((256, 1, 1), 1000, (2, 1, 1))
    assert (attributes.cooperative, attributes.programmatic) == (True, True)
    assert driver.launches[0].grid == (4, 3, 4)  # the grid counts clusters


@pytest.mark.parametrize("asked", [True, False])
def test_programmatic_launch_can_be_asked_for(asked: bool) -> None:
    kernel, driver = bound(image_of("*fp32", programmatic=not asked), 0, programmatic=asked)
    kernel.launch(1)
    assert driver.launches[0].attributes.programmatic is asked


@pytest.mark.parametrize(("shared", "asked"), [(48 * 1024, []), (48 * 1024 + 1, [("allow_shared", 0, "kernel", 48 * 1024 + 1)])])
def test_much_shared_memory_is_asked_for(shared: int, asked: list[object]) -> None:
    _, driver = bound(image_of("*fp32", shared_bytes=shared), 0)
    assert [call for call in driver.calls if call[0] == "allow_shared"] == asked


@pytest.mark.parametrize(("blocks", "asked"), [(8, 0), (16, 1)])
def test_large_clusters_are_asked_for(blocks: int, asked: int) -> None:
    _, driver = bound(image_of("*fp32", cluster=(blocks, 1, 1)), 0)
    assert sum(call[0] == "allow_large_clusters" for call in driver.calls) == asked


def test_an_empty_grid_launches_nothing() -> None:
    kernel, driver = bound(PLAIN, 0, 0, 0.0)
    kernel.grid = (0, 1, 1)
    kernel.launch(1)
    assert driver.launches == []


def test_scratch_is_allocated_for_the_grid_and_aligned() -> None:
    asked: list[tuple[int, int]] = []

    def allocate(num_bytes: int, stream: int) -> FakeTensor:
        asked.append((num_bytes, stream))
        return FakeTensor(1001)

    image = image_of("*fp32", "global_scratch", "profile_scratch", cluster=(2, 1, 1), global_scratch=Scratch(32, 128))
    kernel, driver = bound(image, 0, allocate=allocate)
    kernel.launch(5)
    assert asked == [(2 * 3 * 4 * 2 * 32 + 127, 5)]
    assert driver.launches[0].parameters[1:] == (struct.pack("<Q", 1024), bytes(8))


def test_scratch_needs_an_allocator() -> None:
    with pytest.raises(LaunchError, match="scratch"):
        bound(image_of("*fp32", "global_scratch", "profile_scratch", global_scratch=Scratch(32, 128)), 0)


def test_a_wrong_number_of_arguments_names_the_parameters() -> None:
    with pytest.raises(KernelArgumentError, match=r"takes 3 arguments \(p0, p1, p2\), got 2"):
        bound(PLAIN, 0, 1)


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, FakeTensor(0, torch.bfloat16), "bfloat16"),
        (0, FakeTensor(0, ordinal=1), "cuda:1"),
        (0, FakeTensor(0, ordinal=-1), "cpu"),
        (0, "text", "str"),
        (1, FakeTensor(0), "number of kind i32"),
        (1, 2**31, "i32"),
    ],
)
def test_what_does_not_fit_is_refused(index: int, value: object, text: str) -> None:
    kernel, _ = bound(PLAIN, 0, 1, 1.0)
    with pytest.raises(KernelArgumentError, match=text):
        kernel.set(index, value)  # type: ignore[arg-type]


def test_a_driver_error_keeps_its_code() -> None:
    kernel, driver = bound(PLAIN, 0, 1, 1.0)
    driver.refuse = 701
    with pytest.raises(LaunchError) as caught:
        kernel.launch(1)
    assert caught.value.code == 701


def test_after_unloading_nothing_is_launched() -> None:
    driver = driver_for(PLAIN)
    loaded = LoadedKernel(PLAIN, 0, driver)
    kernel = PreboundKernel(loaded, (0, 1, 1.0), (1, 1, 1))
    loaded.unload()
    loaded.unload()
    with pytest.raises(LaunchError, match="unloaded"):
        kernel.launch(1)
    assert driver.launches == []
    assert driver.calls == [("load", 0, b"code"), ("unload", 0, b"code")]


def test_a_kernel_that_is_refused_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LaunchError("too much", code=1)

    driver = driver_for(PLAIN)
    monkeypatch.setattr(driver, "allow_shared", refuse)
    with pytest.raises(LaunchError, match="too much"):
        LoadedKernel(image_of("*fp32", shared_bytes=10**6), 0, driver)
    assert [call[0] for call in driver.calls] == ["load", "unload"]


def test_collecting_a_kernel_calls_nothing() -> None:
    driver = driver_for(PLAIN)
    LoadedKernel(PLAIN, 0, driver)
    assert driver.calls == [("load", 0, b"code")]


def test_an_image_loads_once_a_device() -> None:
    driver = driver_for(PLAIN)
    assert [LoadedKernel(PLAIN, ordinal, driver).ordinal for ordinal in (0, 1)] == [0, 1]
    assert [call[:2] for call in driver.calls] == [("load", 0), ("load", 1)]


@pytest.mark.parametrize("index", [3, 99, -1])
def test_an_argument_that_is_not_there_is_refused(index: int) -> None:
    kernel, driver = bound(PLAIN, FakeTensor(4096), 7, 0.5)
    with pytest.raises(KernelArgumentError, match=f"no argument {index}"):
        kernel.set(index, 1)
    kernel.launch(1)
    assert driver.launches[0].parameters[2] == struct.pack("<f", 0.5)


BAD_GRIDS = [(-1, 1, 1), (1, 1, -1), (1.0, 1, 1), (2**31, 1, 1), (1, 2**16, 1), (1, 1, 2**16), (1, 1), (1, 1, 1, 1), 7, ("1", "1", "1")]


@pytest.mark.parametrize("grid", BAD_GRIDS)
def test_a_grid_that_cuda_does_not_accept_is_refused(grid: Any) -> None:
    with pytest.raises(KernelArgumentError, match="the grid"):
        PreboundKernel(LoadedKernel(PLAIN, 0, driver_for(PLAIN)), (0, 1, 1.0), grid)
    kernel, driver = bound(PLAIN, 0, 1, 1.0)
    with pytest.raises(KernelArgumentError, match="the grid"):
        kernel.grid = grid
    kernel.launch(1)
    assert driver.launches[0].grid == (2, 3, 4)


def test_the_largest_grids_are_accepted() -> None:
    kernel, driver = bound(PLAIN, 0, 1, 1.0)
    kernel.grid = (2**31 - 1, 2**16 - 1, 2**16 - 1)
    kernel.launch(1)
    assert driver.launches[0].grid == kernel.grid


def test_limits_of_a_grid_count_blocks_and_not_clusters() -> None:
    with pytest.raises(KernelArgumentError, match=f"{2**31} blocks in x"):
        PreboundKernel(LoadedKernel(image_of("i32", cluster=(2, 1, 1)), 0, driver_for()), (1,), (2**30, 1, 1))
