"""The wide product without a device: what it takes, which image a launch wants, and that NVRTC compiles it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rung.cache import Store
from rung.errors import BackendUnavailableError, KernelExportError
from rung.launch import KernelImage, TritonLauncher, cuda_source, rehearse_launches, why_no_nvrtc
from rung.launch.cuda_source import CudaKernel, _nvrtc, export_cuda
from rung.launch.specialise import Specialisation
from rung.passes.kernels import projections, wide
from rung.passes.kernels.support import rows_of
from rung.passes.kernels.tiles import BF16, Dtypes, tiles_for
from rung.passes.kernels.wide import why_not_wide, wide_product
from rung.passes.kernels.wide_kernel import wide_product_kernel

E4M3 = torch.float8_e4m3fn
needs_nvrtc = pytest.mark.skipif(why_no_nvrtc() is not None, reason=why_no_nvrtc() or "")


@pytest.fixture
def prebound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wide.WIDE.__dict__, "road", "prebound")
    monkeypatch.setattr(wide, "why_no_nvrtc", lambda: None)


def constants(**other: Any) -> dict[str, Any]:
    return {"BLOCK_N": 112, "BLOCKS": 2, "PARTS": 1, "STAGES": 5, "E4M3": False, "ACTIVATION": "silu", **other}


def specialisation(**other: Any) -> Specialisation:
    kinds = dict.fromkeys(wide_product_kernel.arguments, "i32")
    kinds |= {"x_map": "tensormap", "weight_map": "tensormap", "out": "*bf16", "x_scale": "*fp32", "weight_scale": "*fp32"}
    return Specialisation(kinds, constants(**other), ())


@pytest.mark.usefixtures("prebound")
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_what_it_takes(dtype: torch.dtype) -> None:
    x, weight = torch.empty(200, 64, dtype=dtype), torch.empty(32, 64, dtype=dtype)
    assert why_not_wide(x, weight, None) is None
    assert why_not_wide(x, weight, torch.empty(32)) == "it adds no bias"
    assert why_not_wide(torch.empty(200, 65, dtype=dtype)[:, :64], weight, None) == "rows are not aligned to 16 bytes"
    assert why_not_wide(x, torch.empty(24, 64, dtype=dtype), None) == "rows are not aligned to 16 bytes"  # of the output
    assert why_not_wide(torch.empty(200 * 64 + 1, dtype=dtype)[1:].view(200, 64), weight, None) == "rows are not aligned to 16 bytes"
    assert why_not_wide(x, torch.empty(32 * 64 + 1, dtype=dtype)[1:].view(32, 64), None) == "rows are not aligned to 16 bytes"
    assert why_not_wide(torch.empty(1, 64, dtype=dtype).expand(200, 64), weight, None) == "rows overlap"
    assert why_not_wide(torch.empty(4096, dtype=dtype).as_strided((100, 64), (32, 1)), weight, None) == "rows overlap"


def test_e4m3_rows_are_copied_where_nothing_takes_them_as_they_lie() -> None:
    """The copy engine wants them aligned and apart, as cuBLAS does; rows of bf16 go to kernels that do without."""
    plain = torch.empty(8, 64, dtype=E4M3)
    odd = torch.empty(8, 72, dtype=E4M3)[:, 3:67], torch.empty(8, 65, dtype=E4M3)[:, :64], torch.empty(1, 64, dtype=E4M3).expand(8, 64)
    assert rows_of(plain) is plain
    assert rows_of(padded := torch.empty(8, 80, dtype=E4M3)[:, 16:]) is padded
    for rows in odd:
        assert rows_of(rows).is_contiguous()
    assert rows_of(bf16 := torch.empty(8, 65, dtype=torch.bfloat16)[:, :64]) is bf16


@pytest.mark.parametrize(
    ("rows", "weight", "activation", "asked"),
    [(64, (28672, 4096), "silu", 0), (65, (28672, 4096), "silu", 1), (256, (28672, 4096), "silu", 1), (257, (28672, 4096), "silu", 0),
     (64, (4096, 4096), "", 0), (129, (4096, 4096), "", 1), (128, (6144, 4096), "", 0),
     (128, (3072, 576), "silu", 0), (None, (28672, 4096), "silu", 1)],
)  # fmt: skip
def test_a_call_asks_for_it_only_where_it_has_that_many_rows(
    rows: int | None, weight: tuple[int, int], activation: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[object] = []
    monkeypatch.setattr(projections, "why_not_wide", lambda *args: times.append(args))  # None: it takes them
    x, values = torch.empty(rows or 1, weight[1], device="meta"), torch.empty(weight, device="meta")
    most = projections.most_rows_linear(rows, x, values, None, activation)
    assert len(times) == asked
    assert rows is None or (rows <= most) == (rows <= projections.most_rows_linear(None, x, values, None, activation))


def test_without_prebound_launches_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wide.WIDE.__dict__, "road", "triton: its interpreter is on")
    assert why_not_wide(torch.empty(8, 64), torch.empty(32, 64), None) == "launches go through triton: its interpreter is on"


def test_triton_cannot_launch_it(tmp_path: Path) -> None:
    launcher = TritonLauncher(wide.WIDE.module, wide.WIDE.name, store=Store(tmp_path), road="triton: no cuda-bindings")
    with pytest.raises(BackendUnavailableError, match=r"CUDA C\+\+, which Triton cannot launch"):
        launcher.run((1, 1, 1), bytes(128), bytes(128), torch.empty(8), *[0] * 7, **constants())


def test_a_launch_wants_one_image_for_all_rows_and_weights() -> None:
    with rehearse_launches(90) as rehearsal:
        for rows, n in ((129, 112), (256, 1000)):
            x, weight = torch.empty(rows, 64, dtype=torch.bfloat16), torch.empty(2 * n, 64, dtype=torch.bfloat16)
            out = wide_product(x, weight, "silu", None, None, blocks=2, block_n=112, stages=5, programmatic=True)
            assert out.shape == (rows, n)
        x = torch.empty(256, 64, dtype=E4M3)
        wide_product(x, weight.to(E4M3), "silu", x.float(), x.float(), blocks=2, block_n=112, stages=5, programmatic=True)
    assert (rehearsal.launches, len(rehearsal.wanted)) == (3, 2)
    (_, found, options), (_, e4m3, _) = rehearsal.wanted.values()
    assert found.kinds["x_map"] == found.kinds["weight_map"] == "tensormap"
    assert (found.constants["E4M3"], e4m3.constants["E4M3"]) == (False, True)
    assert (options["num_warps"], options["num_ctas"], options["launch_pdl"]) == (9, 2, True)


def test_parts_are_float32_of_whole_steps_in_bf16() -> None:
    x, weight = torch.empty(256, 256, dtype=torch.bfloat16), torch.empty(96, 256, dtype=torch.bfloat16)
    way: dict[str, Any] = {"blocks": 2, "block_n": 64, "stages": 6, "programmatic": True}
    with rehearse_launches(90) as rehearsal:
        parts = wide_product(x, weight, "", None, None, **way, parts=4)
        for activation, scale, cut in (("", None, 5), ("silu", None, 2), ("", x.float(), 2)):
            with pytest.raises(AssertionError):
                wide_product(x, weight, activation, scale, scale, **way, parts=cut)
    assert (parts.shape, parts.dtype) == ((4, 256, 96), torch.float32)
    ((_, found, _),) = rehearsal.wanted.values()
    assert found.constants["PARTS"] == 4


def blocks(rows: int, fp8: Dtypes = BF16) -> int:
    """Of a cluster for the 8B shape's gated product; 0: another kernel."""
    tiles = tiles_for(rows, 14336, 4096, activation="silu", fp8=fp8)
    return 0 if tiles is None else tiles.wide


def test_rows_that_take_it() -> None:
    assert [blocks(rows) for rows in (32, 33, 128, 129, 208, 209, 256, 257)] == [0, 1, 1, 0, 0, 2, 2, 0]
    assert [blocks(rows, Dtypes(True, True)) for rows in (16, 17, 128, 129, 256, 257, 512, 513)] == [0, 1, 1, 2, 2, 1, 1, 0]
    for other in (Dtypes(weights=True), Dtypes(True, True, squares=True)):  # converted weights; scales of squares
        assert not any(blocks(rows, other) for rows in range(600))


def parts(rows: int, k: int, *, splittable: bool = True, n: int = 4096) -> int:
    """Of k in products whose sums the norm behind adds up; 0: another kernel."""
    tiles = tiles_for(rows, n, k, splittable=splittable)
    return 0 if tiles is None or not tiles.wide or tiles.shares_k else tiles.splits


def test_rows_whose_parts_are_summed_behind_it() -> None:
    for k in (4096, 14336):
        assert [parts(rows, k) for rows in (64, 129, 192, 193, 256, 257)] == [0, 0, 0, 2, 2, 0]
        assert parts(256, k, splittable=False) == 0
    assert [parts(rows, 14336) for rows in (65, 128)] == [2, 2]
    assert [parts(rows, 4096) for rows in (65, 128)] == [0, 0]
    assert parts(256, 4096, n=6144) == 0
    assert parts(256, 2048) == 0


@pytest.mark.usefixtures("prebound")
def test_a_layer_of_256_rows_launches_parts_and_shared_weights() -> None:
    x, residual, weight, norm = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((256, 4096), (256, 4096), (4096, 4096), (4096,))
    )
    after = torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")
    with rehearse_launches(90) as rehearsal:
        projections.linear_norm_linear(x, weight, None, residual, norm, 1e-5, after, None, "silu")
    found = [(launcher.name, one.constants) for launcher, one, _ in rehearsal.wanted.values()]
    assert [name for name, _ in found] == ["wide_product_kernel", "add_norm_kernel", "wide_product_kernel"]
    assert [constants["PARTS"] for _, constants in found] == [2, 2, 1]
    assert [found[at][1]["BLOCKS"] for at in (0, 2)] == [2, 2]


def test_its_tiles_fill_two_rounds_of_the_8b_shape() -> None:
    tiles = tiles_for(256, 14336, 4096, activation="silu")
    assert tiles is not None
    rounds = 2 * 14336 / tiles.block_n / 132
    assert 0.96 < rounds / 2 <= 1


def test_a_report_says_why_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wide.WIDE.__dict__, "road", "prebound")
    args = torch.empty(1, 4096, device="meta"), torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta"), None, "silu"
    monkeypatch.setattr(wide, "why_no_nvrtc", lambda: "NVRTC cannot be loaded: it is not there")
    assert projections.describe_linear(*args) == "28672x4096 silu to 64 rows, not to 256: NVRTC cannot be loaded: it is not there"
    assert projections.describe_product(*args) == "28672x4096 silu, not to 256: NVRTC cannot be loaded: it is not there"
    assert projections.describe_linear(*args[:3], "") == "28672x4096 to 64 rows"  # the wide kernel is not for it
    monkeypatch.setattr(wide, "why_no_nvrtc", lambda: None)
    assert projections.describe_linear(*args) == "28672x4096 silu to 128 and 209 to 256 rows"
    assert projections.describe_product(*args) == "28672x4096 silu to 128 and 209 to 256 rows"


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuda-bindings are there, and the library that they would load is not."""

    def version() -> tuple[int, ...]:
        raise RuntimeError('Failure finding "libnvrtc.so"\nand where it was looked for')

    bindings = ModuleType("cuda.bindings")
    nvrtc = types.SimpleNamespace(nvrtcVersion=version, nvrtcCreateProgram=lambda *_: version())
    setattr(bindings, "nvrtc", nvrtc)  # noqa: B010 - a module without such an attribute
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(cuda_source, "why_no_cuda_bindings", lambda: None)
    for cached in (why_no_nvrtc, _nvrtc):
        cached.cache_clear()
    yield
    for cached in (why_no_nvrtc, _nvrtc):
        cached.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_bindings_without_their_library_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wide.WIDE.__dict__, "road", "prebound")
    reason = 'NVRTC cannot be loaded: Failure finding "libnvrtc.so"'
    assert why_no_nvrtc() == reason
    x, weight = torch.empty(128, 4096, dtype=torch.bfloat16), torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")
    assert why_not_wide(x, weight, None) == reason
    for rows, kernel in ((128, "activate_kernel"), (64, "product_kernel")):  # behind cuBLAS; Triton's tiles
        with rehearse_launches(90) as rehearsal:
            assert projections.linear(x.to("meta")[:rows], weight, None, "silu").shape == (rows, 14336)
        assert [launcher.name for launcher, _, _ in rehearsal.wanted.values()] == [kernel]
    with pytest.raises(KernelExportError, match="libnvrtc"):
        export_cuda(wide_product_kernel, specialisation(), {"num_warps": 9, "num_ctas": 1, "launch_pdl": True}, 90)


@needs_nvrtc
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    ("e4m3", "activation", "parts"),
    [(False, "silu", 1), (True, "silu", 1), (False, "gelu", 1), (True, "", 1), (False, "", 2)],
)
def test_nvrtc_compiles_it_without_a_device(blocks: int, e4m3: bool, activation: str, parts: int) -> None:
    options = {"num_warps": 9, "num_ctas": blocks, "launch_pdl": True}
    wanted = specialisation(BLOCKS=blocks, E4M3=e4m3, ACTIVATION=activation, PARTS=parts)
    image = export_cuda(wide_product_kernel, wanted, options, 90)
    assert KernelImage.from_bytes(image.to_bytes()) == image
    assert image.cubin[:4] == b"\x7fELF"
    assert b"wide_product_kernel" in image.cubin
    assert image.shared_bytes <= 227 * 1024  # of a block on 9.0
    assert (image.cluster, image.num_warps, image.programmatic) == ((blocks, 1, 1), 9, True)
    assert [parameter.size for parameter in image.parameters] == [128, 128, 8, 8, 8, 4, 4, 4, 4, 4]


@needs_nvrtc
def test_what_does_not_compile_says_why() -> None:
    broken = CudaKernel(name="broken", arguments=(), constants=(), source=lambda _: "nonsense;", shared_bytes=lambda _: 0)
    with pytest.raises(KernelExportError, match=r"broken does not compile: [\s\S]*nonsense"):
        export_cuda(broken, Specialisation({}, {}, ()), {"num_warps": 1, "num_ctas": 1, "launch_pdl": False}, 90)
