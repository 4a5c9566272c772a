"""Prebound launches on the device: equal to Triton's own, in and out of graphs, and clear when they cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rung.attention.backends import triton_paged
from rung.attention.backends.triton_paged import PAGED_ATTENTION, TritonPaged, zero_padded_rows_triton
from rung.errors import KernelArgumentError, LaunchError
from rung.launch import CudaDriver, KernelImage, LoadedKernel, PreboundKernel, Scratch, TritonLauncher, launch_road, torch_scratch
from rung.launch.driver import why_no_cuda_bindings
from rung.launch.specialise import specialise
from rung.runner.ops import TritonStepOps, triton_decode, triton_ops
from tests.attention.cases import NAN, make_batch, make_spec
from tests.runner.decode_worlds import DecodeWorld, draw
from tests.runner.step_worlds import LARGE, SMALL, TINY, RandomBatch, Sizes, World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(why_no_cuda_bindings() is not None, reason="needs cuda-bindings"),
]

TOYS = "tests.launch.toy_kernels"
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
LENGTHS = {
    "decode": [(1, 300), (1, 7), (1, 64)],
    "split decode": [(1, 6000)],
    "prompt": [(500, 0)],
    "mixed": [(1, 200), (40, 0), (130, 700)],
}


def through_triton(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let Triton's own launcher run the kernels of a module."""
    for name, found in list(vars(module).items()):
        if isinstance(found, TritonLauncher):
            monkeypatch.setattr(module, name, TritonLauncher(found.module, found.name, road="triton: asked for"))


def launched(module: ModuleType) -> int:
    return sum(len(found.loaded) for found in vars(module).values() if isinstance(found, TritonLauncher))


def loaded(name: str = "scale_kernel", *, x: torch.dtype = torch.bfloat16, **options: Any) -> LoadedKernel:
    """A toy kernel exported for the current device; its arguments are x, out (float32), count, stride, factor."""
    launcher = TritonLauncher(TOYS, name)
    values = (torch.empty(64, dtype=x, device="cuda"), torch.empty(64, device="cuda"), 7, 3, 0.5)
    found = specialise(launcher.parameters, values, {"BLOCK": 128})
    driver = CudaDriver()
    return LoadedKernel(launcher.images.image(found, options, driver.capability(0)), 0, driver)


def bound(**named: Any) -> tuple[PreboundKernel, torch.Tensor, torch.Tensor]:
    """`out[i] = x[3 i] * 0.5` over 100 elements, with its tensors."""
    x, out = torch.randn(400, device="cuda").to(torch.bfloat16), torch.full((100,), NAN, device="cuda")
    return PreboundKernel(loaded(), (x, out, 100, 3, 0.5), (1, 1, 1), **named), x, out


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


# --- our own kernels -----------------------------------------------------------------------------------------------------------------


def test_the_road_is_prebound() -> None:
    assert launch_road() == "prebound"


@DTYPES
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_attention_equals_tritons_launch(
    dtype: torch.dtype, head_size: int, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(8, 2, head_size)
    batch = make_batch(spec, lengths, dtype=dtype, device="cuda", padded_requests=2, padded_rows=5).without_host()
    prebound = batch.run(TritonPaged(spec))
    assert launched(triton_paged) > 0
    through_triton(monkeypatch, triton_paged)
    assert torch.equal(prebound, batch.run(TritonPaged(spec)))


@DTYPES
def test_zeroed_rows_equal_tritons_launch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = torch.tensor([0, 3, 4, 4], dtype=torch.int32, device="cuda")
    prebound = torch.ones(9, 4, 80, dtype=dtype, device="cuda")
    zero_padded_rows_triton(prebound, starts)
    through_triton(monkeypatch, triton_paged)
    other = torch.ones_like(prebound)
    zero_padded_rows_triton(other, starts)
    assert torch.equal(prebound, other)
    assert prebound.sum().item() == 4 * 4 * 80


@pytest.mark.parametrize("sizes", [SMALL, TINY, LARGE], ids=["small", "tiny", "large"])
def test_step_kernels_equal_tritons_launch(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    batches = [RandomBatch.draw(rng, sizes) for _ in range(20)]
    first, second = World(TritonStepOps(), sizes, "cuda"), World(TritonStepOps(), sizes, "cuda")

    def states(world: World) -> list[dict[str, torch.Tensor]]:
        found = []
        for batch in batches:
            world.load(batch)
            world.step(batch.num_rows, batch.num_requests)
            found.append({name: values.clone() for name, values in world.tensors.items()})
        return found

    prebound = states(first)
    assert launched(triton_ops) >= 9
    through_triton(monkeypatch, triton_ops)
    for ours, theirs in zip(prebound, states(second), strict=True):
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_decode_kernels_equal_tritons_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    first, second = DecodeWorld(TritonStepOps(), "cuda"), DecodeWorld(TritonStepOps(), "cuda")
    drawn = [draw(rng) for _ in range(20)]
    prebound = []
    for contents, rows in drawn:
        first.load(contents)
        first.step(rows)
        prebound.append({name: values.clone() for name, values in first.tensors.items()})
    assert launched(triton_decode) >= 3
    through_triton(monkeypatch, triton_decode)
    for (contents, rows), ours in zip(drawn, prebound, strict=True):
        second.load(contents)
        second.step(rows)
        written = second.tensors.keys() - {"logits"}  # an input, with NaN in it
        assert [name for name in written if not torch.equal(ours[name], second.tensors[name])] == []


def test_kernels_with_much_shared_memory_run() -> None:
    spec = make_spec(8, 2, 128)
    make_batch(spec, [(500, 0)], dtype=torch.bfloat16, device="cuda").without_host().check(TritonPaged(spec), 8e-3)
    assert max(kernel.image.shared_bytes for kernel in PAGED_ATTENTION.loaded) > 48 * 1024


# --- prebound kernels ----------------------------------------------------------------------------------------------------------------


def test_a_launch_computes() -> None:
    kernel, x, out = bound()
    kernel.launch(stream())
    assert torch.equal(out, x[:300:3].float() * 0.5)


def test_patched_arguments_count() -> None:
    kernel, x, out = bound()
    other = torch.full((100,), NAN, device="cuda")
    kernel.set(1, other)
    kernel.set(2, 10)
    kernel.set(3, 5)
    kernel.set(4, -2.0)
    kernel.launch(stream())
    assert torch.equal(other[:10], x[:50:5].float() * -2.0)
    assert bool(other[10:].isnan().all())
    assert bool(out.isnan().all())


@pytest.mark.parametrize("programmatic", [True, False])
def test_the_programmatic_attribute_is_accepted(programmatic: bool) -> None:
    kernel, x, out = bound(programmatic=programmatic)
    torch.cuda.synchronize()  # this kernel does not wait by itself
    kernel.launch(stream())
    assert torch.equal(out, x[:300:3].float() * 0.5)


def test_the_programmatic_attribute_is_captured() -> None:
    kernel, x, out = bound(programmatic=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(stream())
    graph.replay()
    assert torch.equal(out, x[:300:3].float() * 0.5)


@pytest.mark.parametrize("options", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"launch_pdl": True}], ids=str)
def test_launch_options_are_honoured(options: dict[str, Any]) -> None:
    x, out = torch.randn(400, device="cuda").to(torch.bfloat16), torch.full((100,), NAN, device="cuda")
    kernel = PreboundKernel(loaded(**options), (x, out, 100, 3, 0.5), (1, 1, 1))
    torch.cuda.synchronize()
    kernel.launch(stream())
    assert torch.equal(out, x[:300:3].float() * 0.5)


def test_a_capture_keeps_the_arguments_it_saw() -> None:
    kernel, x, out = bound()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(stream())
    kernel.set(4, 100.0)
    x.copy_(torch.randn(400, device="cuda"))
    graph.replay()
    assert torch.equal(out, x[:300:3].float() * 0.5)


def test_an_image_loads_again_after_unloading() -> None:
    first = loaded()
    image = KernelImage.from_bytes(first.image.to_bytes())
    x, out = torch.randn(400, device="cuda").to(torch.bfloat16), torch.full((100,), NAN, device="cuda")
    stale = PreboundKernel(first, (x, out, 100, 3, 0.5), (1, 1, 1))
    stale.launch(stream())
    first.unload()
    with pytest.raises(LaunchError, match="unloaded"):
        stale.launch(stream())
    out.fill_(NAN)
    PreboundKernel(LoadedKernel(image, 0, CudaDriver()), (x, out, 100, 3, 0.5), (1, 1, 1)).launch(stream())
    assert torch.equal(out, x[:300:3].float() * 0.5)


def test_scratch_comes_from_the_stream() -> None:
    memory = torch_scratch(0)(1000, torch.cuda.Stream().cuda_stream)
    assert memory.data_ptr() % Scratch(1, 256).alignment == 0


WRONG: dict[str, tuple[Callable[[PreboundKernel], None], str]] = {
    "dtype": (lambda kernel: kernel.set(0, torch.zeros(4, device="cuda")), "float32"),
    "device": (lambda kernel: kernel.set(0, torch.zeros(4, dtype=torch.bfloat16)), "cpu"),
    "number": (lambda kernel: kernel.set(2, 2**31), "i32"),
    "tensor for a number": (lambda kernel: kernel.set(2, torch.zeros(1, device="cuda")), "number of kind i32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str) -> None:
    act, text = WRONG[case]
    kernel, _, _ = bound()
    with pytest.raises(KernelArgumentError, match=text):
        act(kernel)


def test_a_wrong_number_of_arguments() -> None:
    with pytest.raises(KernelArgumentError, match="takes 5 arguments"):
        PreboundKernel(loaded(), (0, 0), (1, 1, 1))


def test_a_grid_that_is_too_large() -> None:
    kernel, _, _ = bound()
    with pytest.raises(KernelArgumentError, match="1048576 blocks in z"):
        kernel.grid = (1, 1, 2**20)


def test_machine_code_that_is_none() -> None:
    image = KernelImage(cubin=b"\x7fELF" + bytes(4092), entry="kernel", capability=90, parameters=(), num_warps=4)
    with pytest.raises(LaunchError, match="cuModuleLoadData"):
        LoadedKernel(image, 0, CudaDriver())


# --- the launcher of Triton kernels --------------------------------------------------------------------------------------------------


def add(launcher: TritonLauncher, x: torch.Tensor, out: torch.Tensor) -> None:
    launcher.run((-(-x.shape[0] // 128), 1, 1), x, out, x.shape[0], BLOCK=128)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 16, 77, 1000])
def test_a_triton_kernel_runs(count: int, offset: int) -> None:
    launcher = TritonLauncher(TOYS, "add_kernel")
    x, out = torch.randn(count + offset, device="cuda")[offset:], torch.ones(count, device="cuda")
    for _ in range(3):
        add(launcher, x, out)
    assert torch.equal(out, 1 + x + x + x)


def test_a_launch_goes_to_the_current_stream_and_into_a_capture() -> None:
    launcher = TritonLauncher(TOYS, "add_kernel")
    x, out = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    add(launcher, x, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(launcher, x, out)
        add(launcher, x, out)
    torch.cuda.synchronize()
    assert out[0].item() == 1  # captured launches have not run
    graph.replay()
    assert bool((out == 3).all())


def test_threads_share_a_launcher() -> None:
    launcher = TritonLauncher(TOYS, "add_kernel")
    outs = [torch.zeros(100, device="cuda") for _ in range(4)]
    ones = [torch.full((100,), float(number + 1), device="cuda") for number in range(4)]
    add(launcher, ones[0], torch.zeros(100, device="cuda"))
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(1000):
                add(launcher, ones[number], outs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert [out.unique().tolist() for out in outs] == [[1000.0], [2000.0], [3000.0], [4000.0]]


def test_tensors_of_the_host_are_refused() -> None:
    launcher = TritonLauncher(TOYS, "add_kernel")
    x = torch.ones(10, device="cuda")
    add(launcher, x, torch.zeros(10, device="cuda"))
    with pytest.raises(KernelArgumentError, match="cpu"):
        add(launcher, x, torch.zeros(10))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_second_device_that_is_not_the_current_one() -> None:
    launcher = TritonLauncher(TOYS, "add_kernel")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        x, out = torch.ones(1000, device=device), torch.zeros(1000, device=device)
        add(launcher, x, out)
        assert bool((out == 1).all())
    assert sorted(kernel.ordinal for kernel in launcher.loaded) == [0, 1]
