"""`rung::rms_norm`: the root-mean-square norm as one op, so that a pass can find and lower it."""

from __future__ import annotations

import torch

_library = torch.library.Library("rung", "FRAGMENT")
_library.define("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, normed in fp32 and rounded to x's dtype before the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype)


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("rms_norm", rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake("rung::rms_norm", _fake_rms_norm, lib=_library)
