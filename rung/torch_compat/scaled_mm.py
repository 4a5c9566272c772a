"""`torch._scaled_mm`: a product of e4m3 matrices with scales for rows and columns, or for groups of 128.

Private; checked on torch 2.11 and 2.13 (signature and meta function). `torch.nn.functional.scaled_mm` can take its place once it is
public in the oldest torch that is supported.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_GROUP_ROWS = 4


def scaled_mm(
    values: torch.Tensor,  # e4m3 [rows, k], contiguous
    scale: torch.Tensor,  # float32 [rows, 1], or [rows, k / 128] with stride 1 along the rows
    weight: torch.Tensor,  # e4m3 [n, k], contiguous
    weight_scale: torch.Tensor,  # float32 [n], or [n / 128, k / 128]
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[rows, n] in `dtype`; sums are float32 as far as the matrix units keep them ("fast accumulation").

    Checked on 2.11: with scales of groups, cuBLASLt takes a number of rows that is a multiple of 4 only (the scales lie along the rows, and
    are loaded 16 bytes at a time); other numbers are padded with zeros. Can go when torch pads or refuses them itself."""
    rows = values.shape[0]
    if weight_scale.dim() == 2 and rows % _GROUP_ROWS:
        more = -rows % _GROUP_ROWS
        padded = F.pad(values.view(torch.uint8), (0, 0, 0, more)).view(values.dtype)
        return scaled_mm(padded, F.pad(scale.t(), (0, more)).t(), weight, weight_scale, bias, dtype)[:rows]
    columns = weight_scale.unsqueeze(0) if weight_scale.dim() == 1 else weight_scale.t()
    fast = weight_scale.dim() == 1  # groups are scaled in full float32
    result: torch.Tensor = torch._scaled_mm(
        values, weight.t(), scale_a=scale, scale_b=columns, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )
    return result
