"""Launching the kernels that quantise. Names the kernels, imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rung.launch import TritonLauncher
from rung.passes.kernels.launches import row_warps

_KERNELS = "rung.passes.kernels.fp8_kernels"  # named, not imported: it needs Triton, which a warm start does without
QUANTISE = TritonLauncher(_KERNELS, "quantise_kernel")
E4M3 = torch.float8_e4m3fn
ADD_NORM_QUANTISE = TritonLauncher(_KERNELS, "add_norm_quantise_kernel")


class Quantised(NamedTuple):
    """Rows as e4m3, and their scales as `torch_compat.scaled_mm` takes them."""

    values: torch.Tensor  # e4m3 [rows, k]
    scale: torch.Tensor  # float32 [rows, 1], or [rows, k / 128] with stride 1 along the rows


def quantise(
    x: torch.Tensor,
    input_scale: torch.Tensor | None,
    group: int,
    *,
    activation: str = "",
    up: torch.Tensor | None = None,
    programmatic: bool = False,
) -> Quantised:
    """x [rows, n], or with an activation that of x times `up` [rows, n], or where there is none of the first half of x [rows, 2 * n] times
    the second."""
    if activation and up is None:
        x, up = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    rows, n = x.shape
    made = _empty(rows, n, group if input_scale is None else 0, x.device)
    factor = x if up is None else up
    QUANTISE.run(
        (rows, 1, 1),
        x, factor, x if input_scale is None else input_scale, *made, n, x.stride(0), factor.stride(0), made.scale.stride(1),
        ACTIVATION=activation, KIND=_kind(input_scale, group), PROGRAMMATIC=programmatic, launch_pdl=programmatic, **_size(n),
    )  # fmt: skip
    return made


def add_norm_quantise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    input_scale: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
    *,
    programmatic: bool = False,
) -> tuple[Quantised, torch.Tensor]:
    """`launches.add_norm` with the normed rows quantised."""
    (rows, n), parts = x.shape[-2:], x.shape[0] if x.dim() == 3 else 1
    made = _empty(rows, n, group if input_scale is None else 0, x.device)
    hidden = x if residual is None else torch.empty((rows, n), dtype=norm_weight.dtype, device=x.device)
    ADD_NORM_QUANTISE.run(
        (rows, 1, 1),
        x, x if bias is None else bias, x if residual is None else residual, norm_weight, hidden,
        x if input_scale is None else input_scale, *made, rows, n, epsilon,
        x.stride(-2), 0 if residual is None else residual.stride(0), made.scale.stride(1),
        PARTS=parts, BIAS=bias is not None, RESIDUAL=residual is not None,
        KIND=_kind(input_scale, group), PROGRAMMATIC=programmatic, launch_pdl=programmatic, **_summed_size(rows, n, parts),
    )  # fmt: skip
    return made, hidden


def _empty(rows: int, n: int, group: int, device: torch.device) -> Quantised:
    scales = torch.empty((n // group if group else 1, rows), dtype=torch.float32, device=device).t()
    return Quantised(torch.empty((rows, n), dtype=E4M3, device=device), scales)


def _kind(input_scale: torch.Tensor | None, group: int) -> str:
    return "static" if input_scale is not None else "group" if group else "token"


def _size(n: int) -> dict[str, int]:
    block = max(128, 1 << (n - 1).bit_length())
    return {"BLOCK": block, "num_warps": 4 if block <= 2048 else 8 if block <= 8192 else 16}


def _summed_size(rows: int, n: int, parts: int) -> dict[str, int]:
    """`_size` where parts of a row are summed and normed first."""
    size = _size(n)
    if n > 2048:
        size["num_warps"] = max(size["num_warps"], row_warps(rows, n, parts), 16 if parts > 1 else 0)
    return size
