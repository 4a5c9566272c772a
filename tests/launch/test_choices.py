"""Choices among configurations: measured once, kept, taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rung.cache import Store
from rung.counters import Count, Counters
from rung.launch import choices
from rung.launch.choices import FirstConfig, MeasuredChoices
from rung.launch.piece_runtime import PieceRuntime
from rung.launch.program import Program, ProgramConfig, ProgramKernel
from tests.launch.fakes import FakeTensor, driver_for, image_of

FAST, SLOW = image_of("*fp32", entry="fast"), image_of("*fp32", entry="slow")
BLOBS = {"s": SLOW.to_bytes(), "f": FAST.to_bytes()}
KERNEL = ProgramKernel(("p0",), (ProgramConfig("s", "slow code", ("1", "1", "1")), ProgramConfig("f", "fast code", ("2", "1", "1"))))
SOURCE = "def call(args):\n    kernel_0.run(args[0], stream=0)\n    return ()\n"


@pytest.fixture
def chooser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasuredChoices:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    seconds = {0: 2e-6, 1: 1e-6}
    order = iter([0, 1])
    monkeypatch.setattr(choices, "_seconds", lambda run, arguments: seconds[next(order)])
    return MeasuredChoices(Store(tmp_path / "store"), "a GPU", Counters())


def run(chooser: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """(kernels that were loaded, kernels that two calls launched)."""
    monkeypatch.setattr("rung.launch.piece_runtime.wrapper_names", lambda ordinal: {})
    driver = driver_for(FAST, SLOW)
    runtime = PieceRuntime(BLOBS.__getitem__, ordinal=0, driver=driver)
    call = runtime.load(Program(device="cuda", source=SOURCE, kernels={"kernel_0": KERNEL}), chooser)
    call([FakeTensor(4096)])
    call([FakeTensor(4096)])
    return list(runtime.loaded), [launched.function for launched in driver.launches]


def test_the_fastest_is_kept_and_a_later_process_loads_it_alone(chooser: MeasuredChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(chooser, monkeypatch) == (["s", "f"], ["fast", "fast"])
    assert chooser.counters[Count.KERNEL_TUNINGS] == 1
    later = MeasuredChoices(Store(chooser.store.layers[0].root), "a GPU", Counters())
    assert run(later, monkeypatch) == (["f"], ["fast", "fast"])
    assert later.counters[Count.KERNEL_TUNINGS] == 0
    ((_, manifest),) = chooser.store.manifests("choices")
    assert manifest.data == {"code": "fast code", "microseconds": [2.0, 1.0]}
    assert manifest.factors == {"codes": ["slow code", "fast code"], "device": "a GPU"}


def test_another_device_measures_anew(chooser: MeasuredChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    run(chooser, monkeypatch)
    assert MeasuredChoices(chooser.store, "another GPU", Counters()).known(KERNEL) is None


def test_damage_is_a_warning(chooser: MeasuredChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    run(chooser, monkeypatch)
    next((chooser.store.layers[0].root / "choices").iterdir()).write_text("{}")
    with pytest.warns(RuntimeWarning, match="a stored choice could not be used and is made again"):
        assert chooser.known(KERNEL) is None


def test_nothing_is_measured_in_a_capture(chooser: MeasuredChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(chooser, monkeypatch)[1] == ["slow", "slow"]
    assert (chooser.counters[Count.KERNEL_TUNINGS], list(chooser.store.manifests("choices"))) == (0, [])


def test_who_does_not_measure_takes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(FirstConfig(), monkeypatch) == (["s"], ["slow", "slow"])


def test_what_a_kernel_updates_is_measured_on_a_copy() -> None:
    kernel = ProgramKernel(("a", "b", "n"), (), written=("b",))
    a, b = torch.ones(2), torch.ones(4, 4).t()
    own = choices._own(kernel, [a, b, 3])
    assert own[0] is a
    assert (own[1].data_ptr() != b.data_ptr(), own[1].stride(), own[2]) == (True, b.stride(), 3)
