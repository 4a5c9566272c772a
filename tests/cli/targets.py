"""Modules and input builders that the tests of `rung bench` point at."""

from __future__ import annotations

import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class MixesRows(Scale):
    """Every row depends on all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) - x.mean(dim=0)


class Normed(Scale):
    """A norm, and one that almost is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = self.linear.bias * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return self.linear.bias * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))


class Prints(Scale):
    """Cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("here")  # noqa: T201
        return self.linear(x)


class Branches(Scale):
    """Decides on the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.shape[0] > 2 else x


def rows(size: int) -> torch.Tensor:
    return torch.randn(size, 4)


def named_rows(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 4)}


def fixed(size: int) -> torch.Tensor:
    return torch.randn(3, 4)


def fails(size: int = 1) -> torch.Tensor:
    raise ValueError("not here")


def too_many(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rows(size), rows(size)


NUMBER = 7
