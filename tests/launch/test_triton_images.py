"""Why a kernel is missing from a store that must have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rung.cache import Manifest, Store
from rung.errors import CacheMissError, KernelArgumentError
from rung.launch import CudaKernel, triton_images
from rung.launch.cuda_source import export_cuda
from rung.launch.specialise import Specialisation
from rung.launch.triton_images import TritonImages

OPTIONS = {"num_warps": 4}


class Cuda(TritonImages):
    """Of the product in CUDA C++."""

    def __init__(self, store: Store) -> None:
        super().__init__("rung.passes.kernels.wide_kernel", "wide_product_kernel", store)


class Toy(TritonImages):
    """Of a Triton kernel, on a machine without Triton."""

    def __init__(self, store: Store) -> None:
        super().__init__("tests.launch.toy_kernels", "scale_kernel", store)

    def kernel(self) -> object:
        raise ModuleNotFoundError("No module named 'triton'")


def filled(root: Path, *, nvrtc: bool) -> Store:
    """A store that must have everything, filled with another kernel, and on a machine with NVRTC with the one that it compiles too."""
    store = Store(root)
    store.put(Manifest(kind="kernels", key="0" * 64, title="a:b", factors={}, data={}))
    if nvrtc:
        Cuda(store).parameters()
    return Store(root, require_hit=True)


def miss(images: TritonImages) -> CacheMissError:
    with pytest.raises(CacheMissError, match="would have to be compiled") as caught:
        images.find(Specialisation({}, {}, ()), OPTIONS, 90)
    return caught.value


def test_a_store_filled_without_nvrtc_lacks_the_kernel_that_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_images, "why_no_nvrtc", lambda: None)
    error = miss(Cuda(filled(tmp_path, nvrtc=False)))
    assert "NVRTC: none where the store was filled" in error.message
    assert "where NVRTC is" in error.hint


def test_a_store_filled_with_nvrtc_lacks_what_runs_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_images, "why_no_nvrtc", lambda: "NVRTC cannot be loaded: no such file")
    error = miss(Toy(filled(tmp_path, nvrtc=True)))
    assert "NVRTC: where the store was filled -> NVRTC cannot be loaded: no such file" in error.message
    assert "nvidia-cuda-nvrtc" in error.hint


@pytest.mark.parametrize("nvrtc", [False, True])
def test_nvrtc_is_not_named_where_it_makes_no_difference(nvrtc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_images, "why_no_nvrtc", lambda: None if nvrtc else "it is not installed")
    assert "NVRTC" not in miss(Toy(filled(tmp_path, nvrtc=nvrtc))).message
    assert "NVRTC" not in miss(Cuda(filled(tmp_path / "other", nvrtc=True))).message


def test_numbers_that_cuda_would_cut_are_refused() -> None:
    kernel = CudaKernel(name="copy", arguments=("x", "stride"), constants=(), source=lambda constants: "", shared_bytes=lambda constants: 0)
    with pytest.raises(KernelArgumentError, match="takes numbers of 32 bits, not stride"):
        export_cuda(kernel, Specialisation({"x": "*bf16", "stride": "i64"}, {}, ()), OPTIONS, 90)
