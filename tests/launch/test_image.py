from __future__ import annotations

import pytest

from rung.cache import Store
from rung.errors import ArtifactError
from rung.launch.image import KernelImage, Parameter, Scratch
from tests.launch.fakes import image_of

FULL = image_of(
    "*bf16", "i32", "i1", "global_scratch", "profile_scratch", entry="full", shared_bytes=70_000, cluster=(2, 1, 1), cooperative=True,
    programmatic=True, global_scratch=Scratch(256, 128),
)  # fmt: skip


def test_bytes_give_the_image_back() -> None:
    assert KernelImage.from_bytes(FULL.to_bytes()) == FULL


def test_an_image_lies_in_the_store(tmp_path) -> None:
    store = Store(tmp_path)
    assert KernelImage.from_bytes(store.get_blob(store.put_blob(FULL.to_bytes()))) == FULL


@pytest.mark.parametrize("place", [3, 20, 60, -1])
def test_a_flipped_bit_is_found(place: int) -> None:
    data = bytearray(FULL.to_bytes())
    data[place] ^= 1
    with pytest.raises(ArtifactError, match="damaged"):
        KernelImage.from_bytes(bytes(data))


@pytest.mark.parametrize("length", [0, 5, 41, 100])
def test_a_cut_file_is_found(length: int) -> None:
    with pytest.raises(ArtifactError):
        KernelImage.from_bytes(FULL.to_bytes()[:length])


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.launch.image._VERSION", 2)
    data = FULL.to_bytes()
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match="format 2, expected 1"):
        KernelImage.from_bytes(data)


def test_arguments_leave_scratch_out() -> None:
    assert [parameter.kind for parameter in FULL.arguments] == ["*bf16", "i32", "i1"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ArtifactError, match="'descriptor'"):
        Parameter("a", "descriptor")


def test_a_view_of_bytes_is_read() -> None:
    assert KernelImage.from_bytes(memoryview(FULL.to_bytes())) == FULL


@pytest.mark.parametrize("value", [None, "text", 5])
def test_what_is_no_bytes_is_refused(value: object) -> None:
    with pytest.raises(ArtifactError, match="a kernel image is bytes"):
        KernelImage.from_bytes(value)  # type: ignore[arg-type]
