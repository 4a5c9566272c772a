from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rung.errors import KernelExportError
from rung.launch.triton_export import export_triton
from rung.torch_compat import triton_compile, triton_parameters

pytest.importorskip("triton")

TYPES = {"x": "*bf16", "out": "*fp32", "count": "i64", "stride": "i32", "factor": "fp32"}


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    from tests.launch import toy_kernels

    return toy_kernels


def test_the_image_of_a_kernel(kernels: Any) -> None:
    image = export_triton(kernels.scale_kernel, TYPES, {"BLOCK": 64}, options={"num_warps": 2}, capability=90)
    assert [(p.name, p.kind) for p in image.arguments] == list(TYPES.items())
    assert [p.kind for p in image.parameters[-2:]] == ["global_scratch", "profile_scratch"]
    assert (image.entry, image.num_warps, image.capability, image.cluster) == ("scale_kernel", 2, 90, (1, 1, 1))
    assert image.cubin[:4] == b"\x7fELF"


def test_what_is_specialised_away_is_no_parameter(kernels: Any) -> None:
    types = {name: kind for name, kind in TYPES.items() if name != "stride"}
    image = export_triton(kernels.scale_kernel, types, {"BLOCK": 64, "stride": 1}, capability=90)
    assert [p.name for p in image.arguments] == ["x", "out", "count", "factor"]


def test_launch_options_reach_the_image(kernels: Any) -> None:
    options = {"num_warps": 4, "num_ctas": 2, "launch_pdl": True, "launch_cooperative_grid": True}
    image = export_triton(kernels.scale_kernel, TYPES, {"BLOCK": 64}, options=options, capability=90)
    assert (image.cluster, image.programmatic, image.cooperative) == ((2, 1, 1), True, True)


def test_every_parameter_needs_a_type_or_a_value(kernels: Any) -> None:
    with pytest.raises(KernelExportError, match="neither a type nor a value for BLOCK"):
        export_triton(kernels.scale_kernel, TYPES, {}, capability=90)


def test_a_kernel_that_does_not_compile_says_why(kernels: Any) -> None:
    with pytest.raises(KernelExportError, match="cannot compile scale_kernel"):
        export_triton(kernels.scale_kernel, TYPES, {"BLOCK": 63}, capability=90)


@pytest.mark.parametrize("kernel", [lambda x: x, None, "scale_kernel"])
def test_what_is_no_kernel_is_refused(kernel: Any) -> None:
    with pytest.raises(KernelExportError, match=r"expected a function under @triton\.jit"):
        export_triton(kernel, TYPES, {"BLOCK": 64}, capability=90)
    with pytest.raises(KernelExportError, match=r"expected a function under @triton\.jit"):
        triton_parameters(kernel)


def test_annotated_parameters_are_refused(kernels: Any) -> None:
    with pytest.raises(KernelExportError, match="parameter factor"):
        triton_parameters(kernels.annotated_kernel)


PTX = ".visible .entry k(\n\t.param .u64 .ptr .global .align 1 k_param_0,\n\t.param .u32 k_param_1,\n\t.param .f32 k_param_2\n)"
METADATA = {
    "name": "k", "num_warps": 4, "num_ctas": 1, "shared": 0, "launch_cooperative_grid": False, "launch_pdl": False, "tensordesc_meta": [],
    "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
}  # fmt: skip


def compiled(ptx: str = PTX, **changed: Any) -> Any:
    metadata = {name: value for name, value in {**METADATA, **changed}.items() if value is not None}
    return SimpleNamespace(asm={"cubin": b"", "ptx": ptx}, metadata=SimpleNamespace(_asdict=lambda: metadata))


def test_the_entry_declares_its_parameters() -> None:
    assert triton_compile._read(compiled(), ()).parameter_bytes == (8, 4, 4)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"launch_something": 1}, "launch_something"),
        ({"launch_pdl": None}, "launch_pdl"),
        ({"tensordesc_meta": [1]}, "tensor descriptors"),
        ({"warp_size": 64}, "64 threads"),
        ({"ptx": PTX.replace(".u32 k_param_1", ".align 64 .b8 k_param_1[128]")}, "neither a number nor an address"),
        ({"ptx": ""}, "no entry k"),
    ],
)
def test_what_a_launch_would_get_wrong_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelExportError, match=text):
        triton_compile._read(compiled(**changed), ())


def test_parameters_that_the_signature_does_not_name_are_refused(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compile, "_entry_parameters", lambda ptx, name: (8, 8, 8, 4, 4, 8, 8, 8))
    with pytest.raises(KernelExportError, match=r"takes parameters of \(8, 8, 8, 4, 4, 8, 8, 8\) bytes"):
        export_triton(kernels.scale_kernel, TYPES, {"BLOCK": 64}, capability=90)


@pytest.mark.parametrize(
    ("version", "reason"),
    [("3.6.0", None), ("3.8.1", None), ("3.60.0", "Triton 3.60.0 is not one"), ("4.0.0", "Triton 4.0.0 is not one"), ("", "not installed")],
)
def test_only_checked_versions_export(version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compile, "triton_version", lambda: version)
    found = triton_compile.why_no_triton_export()
    assert (found is None) if reason is None else (found is not None and reason in found)
