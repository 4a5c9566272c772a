"""Kernels in CUDA C++, compiled by NVRTC, which comes with torch's CUDA builds; no device is needed. A launcher takes a `CudaKernel` where
it takes a `@triton.jit` function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rung.errors import KernelArgumentError, KernelExportError
from rung.launch.driver import why_no_cuda_bindings
from rung.launch.image import KernelImage, Parameter
from rung.launch.specialise import Specialisation
from rung.torch_compat import TritonParameter

_CANNOT = "a kernel in CUDA C++ cannot be compiled: "


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaKernel:
    """`source(constants)` is a text with a kernel `name`, extern "C", whose parameters are `arguments` in that order: pointers, 32-bit
    integers, floats and tensor maps. `constants` names what a call gives as well, and the text is written for."""

    name: str
    arguments: tuple[str, ...]
    constants: tuple[str, ...]
    source: Callable[[Mapping[str, Any]], str]
    shared_bytes: Callable[[Mapping[str, Any]], int]  # of constants

    @property
    def parameters(self) -> tuple[TritonParameter, ...]:
        """In the words of Triton's kernels: nothing is specialised on the values of arguments."""
        arguments = tuple(TritonParameter(name, constexpr=False, by_value=False, by_alignment=False) for name in self.arguments)
        return arguments + tuple(TritonParameter(name, constexpr=True, by_value=False, by_alignment=False) for name in self.constants)


@functools.cache
def why_no_nvrtc() -> str | None:
    """The reason why no CUDA C++ can be compiled here, or None. Loads the library, which cuda-bindings are installed without: a few ms."""
    try:
        nvrtc, call = _nvrtc()
        call(nvrtc.nvrtcVersion)
    except KernelExportError as error:
        return error.message.removeprefix(_CANNOT)
    return None


def export_cuda(kernel: CudaKernel, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> KernelImage:
    """Compile a kernel for a compute capability (90 for 9.0, with the instructions of that one alone). Raises `KernelExportError`, and
    `KernelArgumentError` for a number of more than 32 bits, of which the kernel would take the lower half."""
    if wide := [name for name in kernel.arguments if specialisation.kinds[name] in ("i64", "u64")]:
        raise KernelArgumentError(f"{kernel.name} takes numbers of 32 bits, not {', '.join(wide)}", hint="lay the tensor out more densely")
    return KernelImage(
        cubin=_compile(kernel.name, kernel.source(specialisation.constants), capability),
        entry=kernel.name,
        capability=capability,
        parameters=tuple(Parameter(name, specialisation.kinds[name]) for name in kernel.arguments),
        num_warps=options["num_warps"],
        shared_bytes=kernel.shared_bytes(specialisation.constants),
        cluster=(options["num_ctas"], 1, 1),
        programmatic=options["launch_pdl"],
    )


def _compile(name: str, source: str, capability: int) -> bytes:
    nvrtc, call = _nvrtc()
    program = call(nvrtc.nvrtcCreateProgram, source.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{capability}a".encode()])
        if code:
            raise KernelExportError(f"{name} does not compile: {_log(nvrtc, call, program)}", hint="it needs the NVRTC of CUDA 12 or newer")
        cubin = bytes(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, cubin)  # writes into it
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: ModuleType, call: Callable[..., Any], program: Any) -> str:
    text = bytes(call(nvrtc.nvrtcGetProgramLogSize, program))
    call(nvrtc.nvrtcGetProgramLog, program, text)
    return text.decode(errors="replace").strip("\0 \n")


@functools.cache
def _nvrtc() -> tuple[ModuleType, Callable[..., Any]]:
    """(the bindings, a call that raises for an error and returns the one value)."""
    if (reason := why_no_cuda_bindings()) is not None:
        raise KernelExportError(f"{_CANNOT}{reason}", hint="pip install cuda-bindings")
    from cuda.bindings import nvrtc

    def call(function: Callable[..., Any], *arguments: object) -> Any:
        try:
            code, *values = function(*arguments)
        except RuntimeError as error:  # the library itself is not there
            reason = (str(error).splitlines() or [""])[0]
            raise KernelExportError(f"{_CANNOT}NVRTC cannot be loaded: {reason}", hint="pip install nvidia-cuda-nvrtc") from error
        if code:
            raise KernelExportError(f"{function.__name__} failed: {code.name}", hint="it needs the NVRTC of CUDA 12 or newer")
        return values[0] if values else None

    return nvrtc, call
