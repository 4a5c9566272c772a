"""Launches that are only noted: one image for all that take it, alignment by storage offset, built from the store or compiled."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rung import torch_compat
from rung.cache import Store
from rung.errors import CacheMissError, KernelExportError
from rung.launch import Built, Rehearsal, TritonLauncher, launches_early, rehearse_launches
from rung.launch.triton_images import TritonImages
from rung.passes.kernels.support import is_programmatic
from rung.torch_compat import TritonParameter, triton_interpreted

PARAMETERS = (
    TritonParameter("x", False, True, True),
    TritonParameter("count", False, False, False),
    TritonParameter("stride", False, True, True),
    TritonParameter("BLOCK", True, True, True),
)


class Images(TritonImages):
    def parameters(self) -> tuple[TritonParameter, ...]:
        return PARAMETERS

    def kernel(self) -> Any:
        return None


@pytest.fixture
def launcher(tmp_path: Path) -> TritonLauncher:
    made = TritonLauncher("tests.launch.toy_kernels", "scale_kernel", store=Store(tmp_path))
    made.__dict__["images"] = Images(made.module, made.name, Store(tmp_path))
    return made


def rehearse(launcher: TritonLauncher, *calls: tuple[Any, ...]) -> Rehearsal:
    with rehearse_launches(90) as rehearsal:
        for grid, *values in calls:
            launcher.run((grid, 1, 1), *values, BLOCK=64)
    return rehearsal


def test_launches_of_one_image_are_one(launcher: TritonLauncher) -> None:
    x = torch.empty(64, device="meta")
    rehearsal = rehearse(launcher, (1, x, 3, 32), (2, x[4:], 5, 48), (0, x.half(), 3, 32))
    assert (rehearsal.launches, len(rehearsal.wanted)) == (2, 1)  # 16 bytes in, 48 = 3 x 16; an empty grid launches nothing
    ((_, specialisation, options),) = rehearsal.wanted.values()
    assert specialisation.kinds == {"x": "*fp32", "count": "i32", "stride": "i32"}
    assert specialisation.divisible_by_16 == ("x", "stride")
    assert options["num_warps"] == 4


def test_alignment_comes_from_storage_offsets(launcher: TritonLauncher) -> None:
    x = torch.empty(64, device="meta")
    rehearsal = rehearse(launcher, (1, x[1:], 3, 32), (1, x, 3, 1))
    divisible = [specialisation.divisible_by_16 for _, specialisation, _ in rehearsal.wanted.values()]
    assert divisible == [("stride",), ("x",)]


def test_a_required_hit_names_the_kernel(tmp_path: Path, launcher: TritonLauncher) -> None:
    launcher.__dict__["images"] = Images(launcher.module, launcher.name, Store(tmp_path, require_hit=True))
    rehearsal = rehearse(launcher, (1, torch.empty(64, device="meta"), 3, 32))
    with pytest.raises(CacheMissError, match="scale_kernel would have to be compiled"):
        rehearsal.build()


def test_the_road_stays_open(launcher: TritonLauncher) -> None:
    before = launcher.run
    rehearse(launcher, (1, torch.empty(64, device="meta"), 3, 32))
    assert launcher.run == before
    assert launcher.loaded == []


# --- building ------------------------------------------------------------------------------------------------------------------------


def job(function: Any, *arguments: Any) -> Future[Any]:
    """A pool that does the job at once."""
    done: Future[Any] = Future()
    try:
        done.set_result(function(*arguments))
    except Exception as error:
        done.set_exception(error)
    return done


def refuse(function: Any, *arguments: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_exception(BrokenProcessPool("a worker was killed"))
    return done


@pytest.fixture
def real(tmp_path: Path) -> TritonLauncher:
    """A launcher whose images are compiled."""
    pytest.importorskip("triton")
    if triton_interpreted():
        pytest.skip("the interpreter compiles nothing")
    return TritonLauncher("tests.launch.toy_kernels", "scale_kernel", store=Store(tmp_path))


def wanted_twice(launcher: TritonLauncher) -> Rehearsal:
    x = torch.empty(64, device="meta", dtype=torch.bfloat16)
    with rehearse_launches(90) as rehearsal:
        for block in (64, 128):
            launcher.run((1, 1, 1), x, x.float(), 64, 1, 2.0, BLOCK=block)
    return rehearsal


@pytest.mark.parametrize(
    ("submit", "in_workers", "failures"), [(None, 0, 0), (job, 2, 0), (refuse, 0, 2)], ids=["threads", "workers", "broken workers"]
)
def test_what_is_missing_is_built_once(real: TritonLauncher, submit: Any, in_workers: int, failures: int, tmp_path: Path) -> None:
    rehearsal = wanted_twice(real)
    assert rehearsal.build(2, submit) == Built(2, 0, in_workers, failures)
    assert rehearsal.build(2, submit) == Built(0, 2)
    again = TritonLauncher(real.module, real.name, store=Store(tmp_path))  # another process
    assert wanted_twice(again).build(2, refuse) == Built(0, 2)


def test_an_image_that_was_built_ahead_is_taken_without_a_store(real: TritonLauncher) -> None:
    real.__dict__["images"] = images = TritonImages(real.module, real.name, Store(None))
    rehearsal = wanted_twice(real)
    rehearsal.build(2, job)
    for _, specialisation, options in rehearsal.wanted.values():
        images.image(specialisation, options, 90)
    assert (images.compiles, images.store_hits) == (2, 0)
    assert images._ahead == {}


def test_an_error_of_a_kernel_keeps_its_type(real: TritonLauncher) -> None:
    x = torch.empty(64, device="meta", dtype=torch.bfloat16)
    with rehearse_launches(90) as rehearsal:
        real.run((1, 1, 1), x, x.float(), 64, 1, 2.0, BLOCK=63)
    for submit in (None, job):
        with pytest.raises(KernelExportError, match="cannot compile scale_kernel"):
            rehearsal.build(2, submit)


@pytest.mark.slow
def test_the_workers_of_the_compiler_build_images(real: TritonLauncher) -> None:
    torch_compat.import_inductor()
    with patch("torch._inductor.config.compile_threads", 2):
        submit = torch_compat.compile_workers()
        assert submit is not None
        assert wanted_twice(real).build(1, submit) == Built(2, 0, in_workers=2)


# --- launchers on their road ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def driving(launcher: TritonLauncher, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `launcher` launches for real."""
    launched: list[str] = []
    monkeypatch.setattr(launcher, "_road", "triton: a test")
    monkeypatch.setattr(launcher, "_through_triton", lambda: lambda grid, *values, **named: launched.append("real"))
    return launched


def test_a_launcher_on_its_road_is_noted_too(launcher: TritonLauncher, driving: list[str]) -> None:
    x = torch.empty(64, device="meta")
    launcher.run((1, 1, 1), x, 3, 32, BLOCK=64)
    taken = launcher.run
    with rehearse_launches(90) as rehearsal:
        launcher.run((1, 1, 1), x, 3, 32, BLOCK=64)
        other = threading.Thread(target=lambda: launcher.run((1, 1, 1), x, 3, 32, BLOCK=64))  # serves while this one starts
        other.start()
        other.join()
        launcher.run((1, 1, 1), x, 3, 32, BLOCK=64)
    assert (rehearsal.launches, driving) == (2, ["real", "real"])
    launcher.run((1, 1, 1), x, 3, 32, BLOCK=64)
    assert (launcher.run, len(driving)) == (taken, 3)


@pytest.mark.parametrize(("capability", "early"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_kernels_are_launched_early_where_the_device_can(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], early: bool) -> None:
    """The instructions are an error of the assembler for older devices, which take the kernels of sampling and attention as well."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 40 + sum(capability))  # of no other test: the answer is kept
    assert launches_early(device) == early
    assert is_programmatic(SimpleNamespace(device=device)) == early
    assert not launches_early(torch.device("cpu"))
