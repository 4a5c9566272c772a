"""The launcher over a driver that records: which images it makes, what it packs, and what a second process compiles."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.errors import KernelArgumentError
from rung.launch import launch_road
from rung.launch.triton_images import _source_hash
from rung.launch.triton_launcher import TritonLauncher
from tests.launch.fakes import MODULE, FakeDriver, FakeTensor

ROOT = Path(__file__).parents[2]


X, OUT = FakeTensor(4096), FakeTensor(8192)


def test_a_call_packs_its_arguments(launcher: TritonLauncher, driver: FakeDriver) -> None:
    launcher.run((5, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64, num_warps=2)
    (launched,) = driver.launches
    assert (launched.grid, launched.stream, launched.attributes.block) == ((5, 1, 1), 1000, (64, 1, 1))
    numbers = [struct.pack("<Q", 4096), struct.pack("<Q", 8192), struct.pack("<i", 7), struct.pack("<i", 3), struct.pack("<f", 0.5)]
    assert list(launched.parameters) == [*numbers, bytes(8), bytes(8)]


def test_a_stride_of_one_is_no_parameter(launcher: TritonLauncher, driver: FakeDriver) -> None:
    launcher.run((5, 1, 1), X, OUT, 7, 1, 0.5, BLOCK=64)
    assert [len(value) for value in driver.launches[0].parameters] == [8, 8, 4, 4, 8, 8]
    assert driver.launches[0].parameters[3] == struct.pack("<f", 0.5)


SAME = [
    ((X, OUT, 8, 3, 0.5), {}),
    ((X, OUT, 1, 3, 0.5), {}),  # not specialised on its value
    ((FakeTensor(4100), OUT, 7, 3, 0.5), {}),  # nor on its alignment
    ((X, OUT, 7, 5, 0.5), {}),
    ((X, OUT, 7, 3, 2), {}),  # a float by the first call
    ((X, FakeTensor(8208), 7, 3, 0.5), {}),
]
OTHER = [
    ((FakeTensor(4096, torch.bfloat16), OUT, 7, 3, 0.5), {}),
    ((X, FakeTensor(8196), 7, 3, 0.5), {}),
    ((X, OUT, 7, 1, 0.5), {}),
    ((X, OUT, 7, 32, 0.5), {}),
    ((X, OUT, 7, 2**31 + 1, 0.5), {}),
    ((X, OUT, 2**31, 3, 0.5), {}),
    ((X, OUT, 7, 3, 0.5), {"BLOCK": 128}),
    ((X, OUT, 7, 3, 0.5), {"num_warps": 8}),
    ((X, OUT, 7, 3, 0.5), {"launch_pdl": True}),
    ((FakeTensor(4096, ordinal=1), FakeTensor(8192, ordinal=1), 7, 3, 0.5), {}),
]


@pytest.mark.parametrize(("arguments", "named"), SAME)
def test_what_shares_an_image(launcher: TritonLauncher, driver: FakeDriver, arguments: Any, named: Any) -> None:
    launcher.run((1, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    launcher.run((1, 1, 1), *arguments, **{"BLOCK": 64, **named})
    assert [launched.function for launched in driver.launches] == ["kernel0", "kernel0"]


@pytest.mark.parametrize(("arguments", "named"), OTHER)
def test_what_takes_another_image(launcher: TritonLauncher, driver: FakeDriver, arguments: Any, named: Any) -> None:
    launcher.run((1, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    for _ in range(2):
        launcher.run((1, 1, 1), *arguments, **{"BLOCK": 64, **named})
    assert [launched.function for launched in driver.launches] == ["kernel0", "kernel1", "kernel1"]
    assert len(launcher.images.made) == 2  # type: ignore[attr-defined]


def test_a_wide_count_is_packed_wide(launcher: TritonLauncher, driver: FakeDriver) -> None:
    launcher.run((1, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    launcher.run((1, 1, 1), X, OUT, 2**40, 3, 0.5, BLOCK=64)
    assert driver.launches[1].parameters[2] == struct.pack("<q", 2**40)


def test_another_device_is_made_current(launcher: TritonLauncher, driver: FakeDriver) -> None:
    launcher.run((1, 1, 1), replace(X, ordinal=1), replace(OUT, ordinal=1), 7, 3, 0.5, BLOCK=64)
    assert (driver.launches[0].stream, driver.current) == (1001, 0)


def test_an_empty_grid_launches_nothing(launcher: TritonLauncher, driver: FakeDriver) -> None:
    launcher.run((0, 1, 1), X, OUT, 0, 3, 0.5, BLOCK=64)
    assert driver.launches == []


def test_keys_are_bounded(launcher: TritonLauncher, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launch.triton_launcher._MAX_KEYS", 3)
    for stride in range(33, 47):
        launcher.run((1, 1, 1), X, OUT, 7, stride, 0.5, BLOCK=64)
    assert len(launcher._by_key) <= 3
    assert len(launcher.images.made) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((FakeTensor(4096, ordinal=-1), FakeTensor(8192, ordinal=-1), 7, 3, 0.5), "cpu"),
        ((X, FakeTensor(8192, ordinal=1), 7, 3, 0.5), "cuda:0, cuda:1"),
        ((X, FakeTensor(8192, ordinal=-1), 7, 3, 0.5), "cpu, cuda:0"),
        ((X, OUT, 7.5, 3, 0.5), "count"),
        ((X, OUT, 7, 3, "x"), "factor"),
    ],
)
def test_what_does_not_fit_is_refused(launcher: TritonLauncher, driver: FakeDriver, arguments: Any, text: str) -> None:
    launcher.run((1, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    with pytest.raises(KernelArgumentError, match=text):
        launcher.run((1, 1, 1), *arguments, BLOCK=64)
    assert len(driver.launches) == 1


@pytest.mark.parametrize("grid", [(-1, 1, 1), (1.0, 1, 1), (2**32, 1, 1), (1, 1), (1, 1, 1, 1), 7])
@pytest.mark.parametrize("first", [True, False])
def test_a_grid_that_cuda_does_not_accept_is_refused(launcher: TritonLauncher, driver: FakeDriver, grid: Any, first: bool) -> None:
    driver.strict = True
    if not first:
        launcher.run((1, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    with pytest.raises(KernelArgumentError, match="the grid"):
        launcher.run(grid, X, OUT, 7, 3, 0.5, BLOCK=64)
    launcher.run((2, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)
    assert driver.launches[-1].grid == (2, 1, 1)


@pytest.mark.parametrize("arguments", [(X, OUT, 7, 3), (X, OUT, 7, 3, 0.5, 64, 9)])
def test_a_wrong_number_of_arguments(launcher: TritonLauncher, arguments: Any) -> None:
    for _ in range(2):  # the first call, and one of the generated function
        with pytest.raises(TypeError):
            launcher.run((1, 1, 1), *arguments, BLOCK=64)
        launcher.run((1, 1, 1), X, OUT, 7, 3, 0.5, BLOCK=64)


# --- roads ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interpreted", "no_bindings", "no_export", "road"),
    [
        (False, None, None, "prebound"),
        (True, None, None, "triton: its interpreter is on"),
        (False, "cuda-bindings is not installed", None, "triton: cuda-bindings is not installed"),
        (False, None, "Triton 9.1 is not one", "triton: Triton 9.1 is not one"),
    ],
)
def test_the_road(interpreted: bool, no_bindings: str | None, no_export: str | None, road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launch.triton_launcher.why_no_cuda_bindings", lambda: no_bindings)
    monkeypatch.setattr("rung.launch.triton_launcher.why_no_triton_export", lambda: no_export)
    monkeypatch.setattr("rung.launch.triton_launcher.triton_interpreted", lambda: interpreted)
    assert launch_road() == road


def test_tritons_own_launcher_is_called_on_its_road(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *values, **named: calls.append((grid, values, named))

    monkeypatch.setattr("rung.launch.triton_images.TritonImages.kernel", lambda self: Kernel())
    TritonLauncher(MODULE, "scale_kernel", road="triton: asked for").run((5, 1, 1), 1, 2, BLOCK=64, num_warps=2)
    assert calls == [((5, 1, 1), (1, 2), {"BLOCK": 64, "num_warps": 2})]


# --- the store -----------------------------------------------------------------------------------------------------------------------

RUN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import torch
from rung.cache import Store
from rung.launch.triton_launcher import TritonLauncher
from rung.launch.driver import Driver
from tests.launch.fakes import MODULE, FakeDriver, FakeImages, FakeTensor
class Loads(FakeDriver):
    def prepare(self, ordinal, function, attributes, table_address):
        return lambda *_: None
launcher = TritonLauncher({MODULE!r}, "scale_kernel", driver=Loads(), store=Store(Path(sys.argv[1])), road="prebound")
launcher.run((1, 1, 1), FakeTensor(4096), FakeTensor(8192), 7, 3, 0.5, BLOCK=64)
compilers = [m for m in sys.modules if m.split(".")[0] == "triton" or m.startswith(("torch._inductor", "torch._dynamo"))]
print(launcher.images.compiles, launcher.images.store_hits, len(compilers), launcher.images.unsaved or "saved")
"""


def run(store: Path, warning: str = "") -> list[str]:
    result = subprocess.run([sys.executable, "-c", RUN, str(store)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert warning in result.stderr
    return result.stdout.split(maxsplit=3)


def test_a_second_process_neither_compiles_nor_imports_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiles, hits, compilers, kept = run(tmp_path)
    assert (compiles, hits, kept.strip()) == ("1", "0", "saved")
    assert int(compilers) > 0
    assert run(tmp_path)[:3] == ["0", "1", "0"]


def test_a_damaged_image_is_built_again(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run(tmp_path)
    for blob in (tmp_path / "blobs").iterdir():
        blob.write_bytes(b"damaged")
    assert run(tmp_path, "a stored kernel could not be used and is built again")[:2] == ["1", "0"]


def test_the_key_covers_what_a_module_imports_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "toys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text("import os\nfrom toys.helpers import helper\n")
    (package / "helpers.py").write_text("from toys.deeper import thing\n")
    (package / "deeper.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = [_source_hash.__wrapped__("toys.kernels")]
    for name in ("deeper", "helpers", "kernels"):
        with (package / f"{name}.py").open("a") as file:
            file.write("# changed\n")
        hashes.append(_source_hash.__wrapped__("toys.kernels"))
    assert len(set(hashes)) == 4
