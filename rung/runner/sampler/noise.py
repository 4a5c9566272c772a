"""Gumbel noise that depends on seed, position and token alone, so that a request's draw does not know its batch."""

from __future__ import annotations

import torch

# The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, num_tokens]; `seeds` and `positions` are int64 [rows]."""
    stream = _mix(_mix(seeds) + positions * _GAMMA)  # [rows]
    tokens = torch.arange(1, num_tokens + 1, device=seeds.device, dtype=torch.int64)
    bits = _mix(stream.unsqueeze(1) + tokens * _GAMMA)  # [rows, num_tokens]
    # log1p keeps full precision for small uniforms, which are the ones that make a token win.
    uniform = (_shift_right(bits, 1).to(torch.float32) * 2.0**-63).clamp_(min=2.0**-64, max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
