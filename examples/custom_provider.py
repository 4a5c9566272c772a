"""A provider of your own: another way to compute an IR op, where it takes the arguments.

python examples/custom_provider.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rung
from rung.passes.providers import OwnProvider


def run(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The arguments of the op. It is traced into the piece; a kernel of your own would be a call of an op of yours here."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def why_not(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> str | None:
    """Why such arguments are left to others; the reason is in the report."""
    return None if x.shape[-1] % 8 == 0 else f"rows of {x.shape[-1]} are no multiple of 8"


def example(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Arguments on which it is compared with the op's meaning before a piece is changed."""
    return torch.randn(rows, 32, device=device).to(dtype), torch.rand(32, device=device).to(dtype), 1e-5


def make_provider() -> OwnProvider:
    return OwnProvider(op="rms_norm", name="torch", run=run, why_not=why_not, example=example, tolerance={torch.float32: 1e-6})


class Normed(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = torch.ops.rung.rms_norm(x.sin(), self.weight, 1e-5)
        return normed * 2


def main() -> None:
    module = rung.wrap(Normed().requires_grad_(False), dynamic={"x": {0: "rows"}}, providers=(make_provider,))
    x = torch.randn(5, 16)
    torch.testing.assert_close(module(x), F.rms_norm(x.sin(), (16,), module.weight, 1e-5) * 2)
    print(module.rung.report()[0]["passes"][0]["providers"])


if __name__ == "__main__":
    main()
