"""Compiling a Triton kernel to machine code without launching it: the one place that knows Triton's private API.

Checked on Triton 3.6.0, 3.7.0 and 3.8.0. What a launch has to know beyond these fields is refused, not guessed: the parameters are
counted against the entry of the generated PTX, and metadata that concern a launch under unknown names are an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rung.errors import KernelExportError

CHECKED_TRITON = ("3.6", "3.7", "3.8")
_HINT = f"use a Triton that rung was checked on ({', '.join(CHECKED_TRITON)}), or launch the kernel through Triton"
_LAUNCH_METADATA = {"launch_cooperative_grid", "launch_pdl"}
_PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True, slots=True)
class TritonParameter:
    """What Triton's decorator says of one parameter of a kernel."""

    name: str
    constexpr: bool
    by_value: bool  # specialised on value 1 and on divisibility
    by_alignment: bool  # specialised on divisibility


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledTriton:
    """A compiled kernel: machine code, launch metadata, and what its machine code takes."""

    cubin: bytes
    entry: str
    parameters: tuple[tuple[str, str], ...]  # (name, type) as in the signature, without constants and scratch
    parameter_bytes: tuple[int, ...]  # of every parameter of the entry, the two scratch areas at the end included
    num_warps: int
    num_ctas: int
    shared_bytes: int
    cooperative: bool
    programmatic: bool
    global_scratch: tuple[int, int]  # size, alignment
    profile_scratch: tuple[int, int]


def triton_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter. Does not import Triton where that was not done before."""
    if "triton" in sys.modules:
        from triton import knobs

        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "y", "yes", "true", "on")


def triton_version() -> str:
    """The installed version, empty when there is none. Does not import Triton."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def why_no_triton_export() -> str | None:
    """The reason why this Triton's kernels are not compiled for a launcher of ours, or None."""
    found = triton_version()
    if not found:
        return "Triton is not installed"
    if ".".join(found.split(".")[:2]) not in CHECKED_TRITON:
        return f"Triton {found} is not one that rung was checked on ({', '.join(CHECKED_TRITON)})"
    return None


def triton_parameters(kernel: Any) -> tuple[TritonParameter, ...]:
    """The parameters of a `@triton.jit` function, in order. Raises `KernelExportError` for a kind that needs more than these words."""
    _check_jitted(kernel)
    for parameter in kernel.params:
        if not parameter.is_constexpr and parameter.annotation_type:
            raise KernelExportError(
                f"{kernel.__name__}: parameter {parameter.name} has a type annotation, which is not supported", hint=_HINT
            )
    return tuple(
        TritonParameter(p.name, p.is_constexpr, not p.do_not_specialize, not (p.do_not_specialize or p.do_not_specialize_on_alignment))
        for p in kernel.params
    )


def _check_jitted(kernel: Any) -> None:
    try:
        from triton import JITFunction
    except ModuleNotFoundError:
        raise KernelExportError("a kernel cannot be compiled: Triton is not installed", hint="pip install triton") from None
    if not isinstance(kernel, JITFunction):
        raise KernelExportError(
            f"{getattr(kernel, '__name__', kernel)!r} is a {type(kernel).__name__}, expected a function under @triton.jit",
            hint="pass the kernel itself; under @triton.autotune that is its attribute fn",
        )


def compile_triton(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible_by_16: Sequence[str],
    options: Mapping[str, Any],
    capability: int,
) -> CompiledTriton:
    """Compile a `@triton.jit` function for a compute capability (90 for 9.0); needs no GPU.

    `signature` names the type of every parameter that is no constant ("*bf16", "i32", ...), `constants` the values of all others."""
    _check_jitted(kernel)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    missing = [name for name in names if name not in signature and name not in constants]
    if missing:
        raise KernelExportError(f"{kernel.__name__}: neither a type nor a value for {', '.join(missing)}", hint="name every parameter once")
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    except (triton.TritonError, RuntimeError) as error:
        raise KernelExportError(f"Triton cannot compile {kernel.__name__} for sm_{capability}: {error}", hint="see the cause") from error
    return _read(compiled, tuple((name, signature[name]) for name in names if name not in constants))


def _read(compiled: Any, parameters: tuple[tuple[str, str], ...]) -> CompiledTriton:
    metadata = compiled.metadata._asdict()
    try:
        result = CompiledTriton(
            cubin=compiled.asm["cubin"],
            entry=metadata["name"],
            parameters=parameters,
            parameter_bytes=_entry_parameters(compiled.asm["ptx"], metadata["name"]),
            num_warps=metadata["num_warps"],
            num_ctas=metadata["num_ctas"],
            shared_bytes=metadata["shared"],
            cooperative=bool(metadata["launch_cooperative_grid"]),
            programmatic=bool(metadata["launch_pdl"]),
            global_scratch=(metadata["global_scratch_size"], metadata["global_scratch_align"]),
            profile_scratch=(metadata["profile_scratch_size"], metadata["profile_scratch_align"]),
        )
    except KeyError as error:
        raise KernelExportError(f"this Triton's kernels have no {error}", hint=_HINT) from error
    unknown = sorted(name for name in metadata if name.startswith("launch_") and name not in _LAUNCH_METADATA)
    if unknown:
        raise KernelExportError(f"{result.entry}: launch metadata {', '.join(unknown)} are unknown", hint=_HINT)
    if metadata.get("tensordesc_meta") or any(kind.startswith(("tensordesc", "nvTmaDesc")) for _, kind in parameters):
        raise KernelExportError(f"{result.entry}: tensor descriptors are not supported", hint="pass pointers and strides")
    if metadata.get("warp_size", 32) != 32:
        raise KernelExportError(f"{result.entry}: warps of {metadata['warp_size']} threads are not CUDA's", hint=_HINT)
    return result


def _entry_parameters(ptx: str, name: str) -> tuple[int, ...]:
    """Bytes of each parameter of an entry, from its declaration (PTX ISA, parameter state space)."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise KernelExportError(f"the generated PTX has no entry {name}", hint=_HINT)
    declared = [line for line in entry[1].split(",") if ".param" in line]
    found = [re.search(r"\.param\s+\.[subf](8|16|32|64)\b", line) for line in declared]
    if None in found:
        raise KernelExportError(f"{name} takes a parameter that is neither a number nor an address", hint=_HINT)
    return tuple(_PTX_BYTES[match[1]] for match in found if match is not None)
