"""The image of a kernel of ours, in whichever language it is written."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from rung.launch.cuda_source import CudaKernel, export_cuda
from rung.launch.image import KernelImage
from rung.launch.specialise import Specialisation
from rung.launch.triton_export import export_triton


def export_kernel(kernel: Any, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> KernelImage:
    """The image of a `@triton.jit` function or a `CudaKernel`. Raises `KernelExportError`."""
    if isinstance(kernel, CudaKernel):
        return export_cuda(kernel, specialisation, options, capability)
    return export_triton(
        kernel,
        specialisation.kinds,
        specialisation.constants,
        divisible_by_16=specialisation.divisible_by_16,
        options=options,
        capability=capability,
    )


def export_job(module: str, name: str, specialisation: Specialisation, options: Mapping[str, Any], capability: int) -> tuple[bytes, float]:
    """(the bytes of the image for a specialisation of the kernel `name` of `module`, seconds); a job of another process."""
    start = time.perf_counter()
    image = export_kernel(getattr(importlib.import_module(module), name), specialisation, options, capability)
    return image.to_bytes(), time.perf_counter() - start
