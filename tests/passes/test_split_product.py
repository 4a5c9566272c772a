"""The product whose k is shared by a cluster, without a device: which image a launch wants, and that NVRTC compiles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.launch import KernelImage, rehearse_launches, why_no_nvrtc
from rung.launch.cuda_source import export_cuda
from rung.launch.specialise import Specialisation
from rung.passes.ir.linear import LINEAR
from rung.passes.kernels import fp8, launches, projections, wide
from rung.passes.kernels.launches import Surroundings
from rung.passes.kernels.split_kernel import split_product_kernel
from rung.passes.kernels.tiles import Dtypes, tiles_for

E4M3 = torch.float8_e4m3fn


def test_a_launch_wants_one_image_for_all_rows_and_weights() -> None:
    with rehearse_launches(90) as rehearsal:
        for rows, n, k in ((129, 4096, 4096), (192, 3584, 14336)):
            tiles = tiles_for(rows, n, k)
            assert tiles is not None
            x, weight = torch.empty(rows, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16, device="meta")
            out = launches.product(x, weight, Surroundings(), tiles)
            assert (out.shape, out.dtype) == ((rows, n), torch.bfloat16)
        tiles = tiles_for(200, 4096, 8192, fp8=Dtypes(True, True))
        assert tiles is not None
        x, weight, scale = torch.empty(200, 8192, dtype=E4M3), torch.empty(4096, 8192, dtype=E4M3), torch.empty(4096)
        out = launches.product(x, weight, Surroundings(x_scale=scale[:200].unsqueeze(1), weight_scale=scale), tiles)
        assert (out.shape, out.dtype) == ((200, 4096), torch.bfloat16)
    assert (rehearsal.launches, len(rehearsal.wanted)) == (3, 2)
    (launcher, found, options), (_, e4m3, _) = rehearsal.wanted.values()
    assert launcher is wide.SPLIT
    assert (found.constants["BLOCK_M"], found.constants["E4M3"]) == (192, False)
    assert (e4m3.constants["BLOCK_M"], e4m3.constants["E4M3"]) == (256, True)
    assert (options["num_warps"], options["num_ctas"], options["launch_pdl"]) == (9, 2, True)


def test_more_rows_than_a_block_has_are_refused() -> None:
    x, weight = torch.empty(129, 64, dtype=torch.bfloat16), torch.empty(64, 64, dtype=torch.bfloat16)
    with rehearse_launches(90), pytest.raises(AssertionError):
        wide.split_product(x, weight, None, None, splits=2, block_m=128, stages=9, programmatic=True)


def test_the_layers_op_takes_it_for_the_rows_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wide.WIDE.__dict__, "road", "prebound")
    monkeypatch.setattr(wide, "why_no_nvrtc", lambda: None)
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert projections.describe(weight, None, "") == "4096x4096 to 64 and 129 to 192 rows"
    assert projections.describe(weight, torch.empty(4096, device="meta"), "") == "4096x4096 to 64 rows, not to 192: it adds no bias"


def test_reports_say_which_rows_it_leaves_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.passes.kernels.support._why_not_device", lambda device: None)
    monkeypatch.setitem(wide.WIDE.__dict__, "road", "prebound")
    monkeypatch.setattr(wide, "why_no_nvrtc", lambda: None)
    x, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((1, 4096), (4096, 4096), (4096,)))
    assert LINEAR.describe(x, weight, None, "") == "gemv to 1, triton to 192, cublas beyond: 4096x4096 to 64 and 129 to 192 rows"
    assert LINEAR.describe(x, weight, bias, "") == "gemv to 1, triton to 64, cublas beyond: 4096x4096, not to 192: it adds no bias"
    assert LINEAR.describe(x, weight, None, "", True) == "batch_invariant: 4096x4096"


@pytest.mark.parametrize(("biased", "rows"), [(False, "to 256 rows"), (True, "to 64 rows, not to 256: it adds no bias")])
def test_a_bias_of_an_e4m3_weight_is_in_its_report(biased: bool, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wide.WIDE.__dict__, "road", "prebound")
    monkeypatch.setattr(wide, "why_no_nvrtc", lambda: None)
    x, weight = torch.empty(1, 4096, dtype=E4M3), torch.empty(4096, 4096, dtype=E4M3)
    bias = torch.empty(4096) if biased else None
    said = fp8.describe_linear(x, torch.empty(1), weight, torch.empty(4096), bias, torch.bfloat16)
    assert said == f"4096x4096 e4m3 {rows}, then _scaled_mm"


@pytest.mark.skipif(why_no_nvrtc() is not None, reason=why_no_nvrtc() or "")
@pytest.mark.parametrize(("rows", "splits", "stages"), [(64, 2, 9), (128, 2, 9), (192, 2, 7), (256, 2, 5), (256, 1, 5)])
@pytest.mark.parametrize("e4m3", [False, True])
def test_nvrtc_compiles_it_without_a_device(rows: int, splits: int, stages: int, e4m3: bool) -> None:
    kinds = dict.fromkeys(split_product_kernel.arguments, "i32")
    kinds |= {"x_map": "tensormap", "weight_map": "tensormap", "out": "*bf16", "x_scale": "*fp32", "weight_scale": "*fp32"}
    constants: dict[str, Any] = {"BLOCK_M": rows, "SPLITS": splits, "STAGES": stages, "E4M3": e4m3}
    options = {"num_warps": 9, "num_ctas": splits, "launch_pdl": True}
    image = export_cuda(split_product_kernel, Specialisation(kinds, constants, ()), options, 90)
    assert KernelImage.from_bytes(image.to_bytes()) == image
    assert b"split_product_kernel" in image.cubin
    assert image.shared_bytes <= 227 * 1024  # of a block on 9.0
    assert (image.cluster, image.num_warps, image.programmatic) == ((splits, 1, 1), 9, True)
