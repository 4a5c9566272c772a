"""The Triton provider of products of the same rows by weights that lie apart: one launch with the tiles of one product of all outputs while
rows are few, cuBLAS for each beyond. The wide kernel takes both halves of a gated weight together, so it is not for these."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.kernels import launches
from rung.passes.kernels.launches import Surroundings
from rung.passes.kernels.support import is_programmatic, rows_of, why_not_triton
from rung.passes.kernels.tiles import most_rows, tiles_for

Bias = torch.Tensor | None


def why_not(*args: Any) -> str | None:
    """Of either op."""
    x, *others = (arg for arg in args if isinstance(arg, torch.Tensor))
    if any(other.dim() == 2 and not other.is_contiguous() for other in others):
        return "a weight is not contiguous"
    return why_not_triton(x, *others)


def describe_gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> str:
    n, k = gate.shape
    return f"{n}+{n}x{k} {activation} to {most_rows(n, k, activation=activation, wide=False)} rows"


def describe_three(x: torch.Tensor, *args: Any) -> str:
    sizes, k = [weight.shape[0] for weight in args[:3]], args[0].shape[1]
    return f"{'+'.join(map(str, sizes))}x{k} to {most_rows(sum(sizes), k, wide=False)} rows"


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    x, programmatic = rows_of(x), is_programmatic(x)
    tiles = tiles_for(x.shape[0], *gate.shape, activation=activation, programmatic=programmatic, wide=False)
    if tiles is not None:
        return launches.product(x, gate, Surroundings(up=up, activation=activation), tiles)
    return launches.activate_pair(F.linear(x, gate), F.linear(x, up), activation, programmatic=programmatic)


def three(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, *biases: Bias
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weights = rows_of(x), (first, second, third)
    total = sum(weight.shape[0] for weight in weights)
    tiles = tiles_for(x.shape[0], total, first.shape[1], programmatic=is_programmatic(x), wide=False)
    if tiles is not None:
        one, two, three = launches.sibling_products(x, weights, biases, tiles)
        return one, two, three
    return F.linear(x, first, biases[0]), F.linear(x, second, biases[1]), F.linear(x, third, biases[2])
