"""What our kernels take, and how."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence

import torch

from rung.launch import launches_early
from rung.launch.tensor_map import ALIGNMENT
from rung.torch_compat import triton_interpreted

_TUNED = (9, 0)


def why_not_triton(x: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """The reason why the product kernels do not take these tensors, or None. Reads nothing of the size of dimension 0 of x."""
    if (reason := _why_not_device(x.device)) is not None:
        return reason
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, not 2"
    if x.dtype != torch.bfloat16:
        return f"a tensor is of dtype {x.dtype}, not torch.bfloat16"
    for other in others:
        if other is None:
            continue
        if other.dtype != torch.bfloat16:
            return f"a tensor is of dtype {other.dtype}, not torch.bfloat16"
        if other.device != x.device:
            return f"tensors lie on {x.device} and {other.device}"
        if other.stride(-1) != 1:
            return "a weight is not contiguous in its last dimension"
    return None


def why_not_fp8(x: torch.Tensor, weights: Sequence[torch.Tensor], *others: torch.Tensor | None) -> str | None:
    """As `why_not_triton`, for e4m3 weights; x may be e4m3 too. `others` are bf16 vectors and rows."""
    if (reason := _why_not_device(x.device)) is not None:
        return reason
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, not 2"
    for other in others:
        if other is not None and other.dtype != torch.bfloat16:
            return f"a tensor is of dtype {other.dtype}, not torch.bfloat16"
        if other is not None and other.dim() == 1 and other.stride(0) != 1:
            return "a vector is not contiguous"
    for weight in weights:
        if weight.dtype != torch.float8_e4m3fn:
            return f"a weight is of dtype {weight.dtype}, not torch.float8_e4m3fn"
        if not weight.is_contiguous():
            return "a weight is not contiguous"
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            return f"a weight is {weight.shape[0]} x {weight.shape[1]}, not multiples of 16"
    return None


@functools.cache
def _why_not_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{device.type!r} is no CUDA device"
    if importlib.util.find_spec("triton") is None or triton_interpreted():
        return "Triton is not installed" if importlib.util.find_spec("triton") is None else "Triton's interpreter is on"
    capability = torch.cuda.get_device_capability(device)
    if capability != _TUNED:
        return f"the tiles were chosen for compute capability 9.0, not {capability[0]}.{capability[1]}"
    return None


def runs_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels run over x: on a device, or in Triton's interpreter."""
    return importlib.util.find_spec("triton") is not None and (x.device.type == "cuda" or triton_interpreted())


def wants_gradient(args: Iterable[object]) -> bool:
    """Whether a gradient is to come back to one of the arguments."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [rows, k] with the elements of a row side by side; rows of one byte an element also aligned and apart, as all that multiplies e4m3
    wants them."""
    if x.stride(-1) != 1 or (x.element_size() == 1 and not (is_aligned(x) and x.stride(0) >= x.shape[1])):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, as storages do. Reads no size of the matrix."""
    elements = ALIGNMENT // matrix.element_size()
    return matrix.stride(0) % elements == 0 and matrix.storage_offset() % elements == 0


def is_programmatic(x: torch.Tensor) -> bool:
    """Whether kernels over x are launched programmatically; Triton's interpreter and older devices know no such launch."""
    return launches_early(x.device)
