"""A stored piece and the choice between its two loaders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rung import torch_compat
from rung.compile import artifact as artifact_module
from rung.compile.artifact import Artifact, PieceLoader, Sources
from rung.compile.stock_reasons import StockReason
from rung.errors import ArtifactError, BackendUnavailableError, LaunchError
from rung.launch import FirstConfig, Program, ProgramConfig, ProgramKernel
from tests.launch.fakes import FakeTensor, driver_for, image_of

IMAGE = image_of("*fp32", "i32", "global_scratch")
SOURCE = "def call(args):\n    x, n = args\n    args.clear()\n    kernel_0.run(x, n, stream=get_raw_stream(ordinal))\n    return (x,)\n"
CPU = Program(device="cpu", source="def call(args):\n    return (args[0] * 2,)\n")


class Blobs(dict[str, bytes]):
    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self[digest] = data
        return digest


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture(autouse=True)
def _stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's loader gives a function that says what it was given."""
    monkeypatch.setattr(artifact_module, "stock_call", lambda data: lambda args: ("stock", data))


def on_gpu(blobs: Blobs, **fields: Any) -> Artifact:
    kernel = ProgramKernel(("p0", "p1"), (ProgramConfig(blobs.put(IMAGE.to_bytes()), "code", ("p1", "1", "1")),))
    program = Program(device="cuda", source=SOURCE, kernels={"kernel_0": kernel})
    return Artifact(stock=blobs.put(b"pickle"), text=blobs.put(b"text"), program=program, **fields)


def bind(artifact: Artifact, blobs: Blobs, device: str = "cpu", **named: Any) -> tuple[Callable[[list[Any]], Sequence[Any]], Any]:
    return PieceLoader(torch.device(device), blobs.__getitem__, **named).bind(artifact, FirstConfig())


def test_it_survives_its_bytes_and_names_every_blob(blobs: Blobs) -> None:
    artifact = on_gpu(blobs)
    assert Artifact.from_bytes(artifact.to_bytes()) == artifact
    assert set(artifact.blobs) == set(blobs)
    refused = Artifact(stock="a", text="b", reason=StockReason.NAME, detail="why")
    assert Artifact.from_bytes(refused.to_bytes()) == refused


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"version": 99}', b'{"version": 1, "stock": "a"}'])
def test_other_bytes_are_no_artifact(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="is no artifact of version 1"):
        Artifact.from_bytes(data)


def test_a_program_on_a_gpu_launches_its_kernels(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launch.piece_runtime.wrapper_names", lambda ordinal: {"ordinal": ordinal, "get_raw_stream": lambda n: 70 + n})
    driver = driver_for(IMAGE)
    call, refused = bind(on_gpu(blobs), blobs, "cuda:2", driver=driver)
    assert refused is None
    assert [name for name, *_ in driver.calls] == ["load"]  # before the first call
    given = [FakeTensor(4096, ordinal=2), 5]
    call(given)
    (launched,) = driver.launches
    assert (launched.grid, launched.stream, given) == ((5, 1, 1), 72, [])


def test_a_program_on_a_cpu_runs(blobs: Blobs) -> None:
    call, refused = bind(Artifact(stock="", text="", program=CPU), blobs)
    assert refused is None
    assert call([torch.ones(2)])[0].tolist() == [2.0, 2.0]


def no_driver() -> None:
    raise BackendUnavailableError("there is none")


def refuse_library(data: bytes, digest: str) -> None:
    raise LaunchError("refused")


def test_every_reason_leads_to_the_stock_loader(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(artifact: Artifact, device: str = "cpu", **named: Any) -> StockReason | None:
        call, refused = bind(artifact, blobs, device, **named)
        assert call([])[0] == "stock"
        return refused

    stock = blobs.put(b"pickle")
    library = blobs.put(b"\x7fELF")
    with_library = Program(device="cpu", source=CPU.source, libraries={"f": library}, cpu_flags=("avx999",))
    assert reason(Artifact(stock=stock, text="", reason=StockReason.CONSTANTS)) is StockReason.CONSTANTS
    assert reason(Artifact(stock=stock, text="", program=with_library)) is StockReason.CPU
    assert reason(on_gpu(blobs), "cpu") is StockReason.DEVICE_TYPE
    assert reason(Artifact(stock=stock, text="", program=CPU), "meta") is StockReason.DEVICE_TYPE
    monkeypatch.setattr(artifact_module, "cpu_flags", lambda: ("avx999", "sse2"))
    monkeypatch.setattr("rung.launch.piece_runtime.load_function", refuse_library)
    assert reason(Artifact(stock=stock, text="", program=with_library)) is StockReason.UNLOADABLE
    monkeypatch.setattr(artifact_module, "CudaDriver", no_driver)
    assert reason(on_gpu(blobs), "cuda:0") is StockReason.DRIVER


def test_a_damaged_image_is_an_error_and_no_reason(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launch.piece_runtime.wrapper_names", lambda ordinal: {})
    artifact = on_gpu(blobs)
    assert artifact.program is not None
    del blobs[next(artifact.program.blobs())]
    with pytest.raises(KeyError):  # what `read` raises; a store raises ArtifactError, and the piece is built again
        bind(artifact, blobs, "cuda:0", driver=driver_for(IMAGE))


def test_without_memory_nothing_is_launched(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"get_raw_stream": lambda n: 7, "empty_strided_cuda": None}
    monkeypatch.setattr("rung.launch.piece_runtime.wrapper_names", lambda ordinal: {"ordinal": ordinal, **names})
    driver = driver_for(IMAGE)
    artifact = on_gpu(blobs)
    assert artifact.program is not None
    for program in (artifact.program, replace(artifact.program, checked=(0,))):  # without and with a look at addresses
        call, _ = bind(replace(artifact, program=program), blobs, "cuda:0", driver=driver)
        x = torch.ones(3)
        (out,) = torch_compat.memoryless(call)([x, 5])
        assert out is x
        assert driver.launches == []


def test_sources_are_read_when_asked_for(blobs: Blobs) -> None:
    asked: list[str] = []

    def read(digest: str) -> bytes:
        asked.append(digest)
        if digest not in blobs:
            raise ArtifactError("gone")
        return blobs[digest]

    sources = Sources([on_gpu(blobs), Artifact(stock="", text="gone")], read)
    assert (len(sources), asked) == (2, [])
    assert list(sources) == ["text", ""]


def test_inductors_form_serves_the_gpu_that_it_was_compiled_for(blobs: Blobs) -> None:
    stock = Artifact(stock=blobs.put(b"pickle"), text="", reason=StockReason.NAME, ordinal=1)
    assert Artifact.from_bytes(stock.to_bytes()) == stock
    assert [stock.serves(torch.device(name)) for name in ("cuda:1", "cuda:0")] == [True, False]
    driver = driver_for(IMAGE)
    assert bind(stock, blobs, "cuda:1", driver=driver)[1] is StockReason.NAME
    with pytest.raises(ArtifactError, match="is for cuda:1 and not for cuda:0, and ours cannot run: name"):
        bind(stock, blobs, "cuda:0", driver=driver)


def test_a_program_serves_every_gpu(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launch.piece_runtime.wrapper_names", lambda ordinal: {"ordinal": ordinal, "get_raw_stream": lambda n: 70 + n})
    artifact = on_gpu(blobs, ordinal=1)
    for name in ("cuda:0", "cuda:1"):
        assert artifact.serves(torch.device(name))
        assert bind(artifact, blobs, name, driver=driver_for(IMAGE))[1] is None


def test_an_older_artifact_for_another_gpu_than_the_first_is_built_again(blobs: Blobs) -> None:
    """They did not say which GPU Inductor's form was for; a program served all, and what named no GPU does."""

    def older(artifact: Artifact) -> bytes:
        data = json.loads(artifact.to_bytes())
        del data["ordinal"]
        return json.dumps(data).encode()

    assert Artifact.from_bytes(older(on_gpu(blobs))) == on_gpu(blobs)
    assert Artifact.from_bytes(older(Artifact(stock="a", text="b", reason=StockReason.NAME))).serves(torch.device("cpu"))
    with pytest.raises(ArtifactError, match="does not say for which"):
        Artifact.from_bytes(older(Artifact(stock="a", text="b", reason=StockReason.DEVICES, detail="it names device 1")))
