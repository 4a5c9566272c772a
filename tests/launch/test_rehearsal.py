"""Launches that are only noted: one image for all that take it, alignment by storage offset, built from the store or compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rung.cache import Store
from rung.errors import CacheMissError
from rung.launch import Rehearsal, TritonLauncher, rehearse_launches
from rung.launch.triton_images import TritonImages
from rung.torch_compat import TritonParameter

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
