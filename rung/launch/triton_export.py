"""A Triton kernel as a `KernelImage`. Triton itself is reached through torch_compat alone, and only when something is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rung.errors import KernelExportError
from rung.launch.image import GLOBAL_SCRATCH, PROFILE_SCRATCH, KernelImage, Parameter, Scratch
from rung.torch_compat import compile_triton


def export_triton(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    divisible_by_16: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    capability: int,
) -> KernelImage:
    """Compile a `@triton.jit` function for a compute capability (90 for 9.0); no GPU is needed.

    `signature` gives the type of every parameter that stays ("*bf16", "i32", ...), `constants` the value of all others (constexprs and
    integers fixed at 1), `divisible_by_16` the names promised to be so at each launch. Raises `KernelExportError`."""
    compiled = compile_triton(kernel, signature, constants, divisible_by_16, options or {}, capability)
    parameters = tuple(Parameter(name, kind) for name, kind in compiled.parameters)
    parameters += (Parameter(GLOBAL_SCRATCH, GLOBAL_SCRATCH), Parameter(PROFILE_SCRATCH, PROFILE_SCRATCH))
    ours = tuple(parameter.size for parameter in parameters)
    if ours != compiled.parameter_bytes:
        raise KernelExportError(
            f"{compiled.entry} takes parameters of {compiled.parameter_bytes} bytes, its signature says {ours}",
            hint="this Triton passes parameters in another way; launch the kernel through it",
        )
    return KernelImage(
        cubin=compiled.cubin,
        entry=compiled.entry,
        capability=capability,
        parameters=parameters,
        num_warps=compiled.num_warps,
        shared_bytes=compiled.shared_bytes,
        cluster=(compiled.num_ctas, 1, 1),
        cooperative=compiled.cooperative,
        programmatic=compiled.programmatic,
        global_scratch=Scratch(*compiled.global_scratch),
        profile_scratch=Scratch(*compiled.profile_scratch),
    )
