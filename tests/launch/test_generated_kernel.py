"""Kernels of Inductor's, launched by us."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from rung.errors import KernelArgumentError, LaunchError
from rung.launch.generated_kernel import GeneratedKernel
from rung.launch.image import KernelImage, Scratch
from rung.launch.kernel import LoadedKernel
from rung.launch.program import ProgramConfig, ProgramKernel
from tests.launch.fakes import FakeDriver, FakeTensor, driver_for, image_of

IMAGE = image_of("*bf16", "i32", "fp64", "global_scratch", "profile_scratch")
TAKES = ("p0", "p1", "p2", "xnumel")  # the machine code takes no xnumel


def kernel_of(*grids: tuple[str, str, str], before: tuple[str, ...] = (), image: KernelImage = IMAGE) -> ProgramKernel:
    return ProgramKernel(TAKES, tuple(ProgramConfig(f"{number:064}", f"code {number}", grid, before) for number, grid in enumerate(grids)))


def made(kernel: ProgramKernel, choose: Any = None, image: KernelImage = IMAGE) -> tuple[GeneratedKernel, FakeDriver]:
    driver = driver_for(image)
    loaded = [LoadedKernel(image, 0, driver) for _ in kernel.configs]
    return GeneratedKernel("kernel_0", kernel, loaded, choose or (lambda *_: 0)), driver


def test_it_packs_what_the_machine_code_takes_and_computes_the_grid() -> None:
    kernel, driver = made(kernel_of(("-(xnumel // -(256))", "rows_", "1"), before=("rows_ = max(p1, 2)",)))
    kernel.run(FakeTensor(4096), 7, 0.5, 1000, stream=11)
    (launched,) = driver.launches
    assert (launched.grid, launched.stream) == ((4, 7, 1), 11)
    assert launched.parameters == (struct.pack("<Q", 4096), struct.pack("<i", 7), struct.pack("<d", 0.5), bytes(8), bytes(8))


def test_an_empty_grid_launches_nothing() -> None:
    kernel, driver = made(kernel_of(("-(xnumel // -(256))", "1", "1")))
    kernel.run(FakeTensor(4096), 7, 0.5, 0, stream=11)
    assert driver.launches == []


@pytest.mark.parametrize("value", [2**40, "seven", None])
def test_a_number_that_does_not_fit_is_named(value: Any) -> None:
    kernel, driver = made(kernel_of(("1", "1", "1")))
    with pytest.raises(KernelArgumentError, match=r"kernel_0 was given p0: FakeTensor for \*bf16, p1: \w+ for i32") as error:
        kernel.run(FakeTensor(4096), value, 0.5, 1, stream=0)
    assert error.value.hint
    assert driver.launches == []


def test_what_a_program_cannot_give_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(LaunchError, match="needs scratch memory"):
        made(kernel_of(("1", "1", "1")), image=image_of("*fp32", "global_scratch", global_scratch=Scratch(8)))
    with pytest.raises(LaunchError, match="takes p3, p4, p5"):
        made(kernel_of(("1", "1", "1")), image=image_of("*fp32", "i32", "i32", "i32", "i32", "i32"))


def test_the_first_call_chooses_once() -> None:
    asked: list[int] = []

    def choose(kernel: ProgramKernel, configs: Sequence[Any], arguments: Sequence[Any]) -> int:
        asked.append(len(configs))
        return 1

    kernel, driver = made(kernel_of(("1", "1", "1"), ("2", "1", "1")), choose)
    for _ in range(3):
        kernel.run(FakeTensor(4096), 7, 0.5, 1, stream=0)
    assert asked == [2]
    assert [launched.grid[0] for launched in driver.launches] == [2, 2, 2]


def test_who_cannot_choose_now_is_asked_again_and_the_first_runs() -> None:
    answers = iter([None, 1])
    kernel, driver = made(kernel_of(("1", "1", "1"), ("2", "1", "1")), lambda *_: next(answers))
    for _ in range(3):
        kernel.run(FakeTensor(4096), 7, 0.5, 1, stream=0)
    assert [launched.grid[0] for launched in driver.launches] == [1, 2, 2]
