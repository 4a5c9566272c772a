"""The Triton provider of the products of a decoder layer: our kernels where they win, cuBLAS between them where it does.

What runs depends on the number of rows. One row: norm and residual are part of the products. Few rows: a product may leave the sum of its
parts to the kernel that adds the residual and norms. Many rows: cuBLAS, and one kernel for what stands between two products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.kernels import launches
from rung.passes.kernels.launches import Surroundings
from rung.passes.kernels.support import is_programmatic, rows_of, why_not_triton
from rung.passes.kernels.tiles import most_rows, say_rows, tiles_for, why_fewer_rows
from rung.passes.kernels.wide import why_not_wide


def why_not(*args: Any) -> str | None:
    """Of any of the three ops."""
    return why_not_triton(*(arg for arg in args if isinstance(arg, torch.Tensor)))


def why_not_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, invariant: bool = False
) -> str | None:
    return "batch invariance was asked for" if invariant else why_not(x, weight, bias)


def most_rows_linear(
    rows: int | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, invariant: bool = False
) -> int:
    """Asks for the kernels in CUDA C++ only where the answer depends on it: this runs at each call outside of a graph."""
    n, k = weight.shape
    few, most = (most_rows(n // (2 if activation else 1), k, activation=activation, wide=wide) for wide in (False, True))
    if few == most or (rows is not None and not few < rows <= most):
        return few
    return most if why_not_wide(weight, weight, bias) is None else few


def describe_linear(*args: Any) -> str:
    _, weight, bias, activation, *_ = args
    return describe(weight, bias, activation)


def describe_product(*args: Any) -> str:
    """The size of a product, where the provider says the rest: with the rows of our kernels where cuBLAS takes some between them."""
    _, weight, bias, activation, *invariant = args
    size = f"{weight.shape[0]}x{weight.shape[1]}{' ' + activation if activation else ''}"
    if any(invariant):
        return size
    said = say_rows(weight, bias, activation=activation)
    return f"{size} {said}" if " and " in said.partition(" rows")[0] else size + why_fewer_rows(weight, bias, activation=activation)


def describe_norm_linear(*args: Any) -> str:
    return describe_linear(args[0], *args[3:])


def describe_linear_norm(*args: Any) -> str:
    return describe(args[1], args[2], "", splittable=True)


def describe_linear_norm_linear(*args: Any) -> str:
    return f"{describe(args[1], args[2], '', splittable=True)}; {describe_linear(args[0], *args[6:])}"


def describe(weight: torch.Tensor, bias: torch.Tensor | None, activation: str, *, splittable: bool = False) -> str:
    """How many rows our kernels take for a weight; cuBLAS takes more."""
    rows, k = weight.shape
    said = say_rows(weight, bias, activation=activation, splittable=splittable)
    return f"{rows}x{k}{' ' + activation if activation else ''} {said}"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, invariant: bool = False) -> torch.Tensor:
    """By our kernels: of one row by that without matrix units."""
    return _product(rows_of(x), weight, Surroundings(bias=bias, activation=activation))


def cublas(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, invariant: bool = False) -> torch.Tensor:
    result = F.linear(x, weight, bias)
    return launches.activate(result, activation, programmatic=is_programmatic(x)) if activation else result


def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, epsilon: float, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    x = rows_of(x)
    if x.shape[0] == 1:
        return _product(x, weight, Surroundings(bias=bias, activation=activation, norm_weight=norm_weight, epsilon=epsilon))
    normed, _ = launches.add_norm(x, None, norm_weight, epsilon, programmatic=is_programmatic(x))
    return _product(normed, weight, Surroundings(bias=bias, activation=activation))


def linear_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, norm_weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = rows_of(x), rows_of(residual)
    if x.shape[0] == 1:
        hidden = _product(x, weight, Surroundings(bias=bias, residual=residual))
        return launches.add_norm(hidden, None, norm_weight, epsilon, programmatic=is_programmatic(x))
    parts = _product(x, weight, Surroundings(bias=bias), splittable=True)
    left = bias if parts.dim() == 3 else None  # the bias of a split product is added behind its sum
    return launches.add_norm(parts, residual, norm_weight, epsilon, left, programmatic=is_programmatic(x))


def linear_norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    next_weight: torch.Tensor,
    next_bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.shape[0] == 1:
        hidden = _product(rows_of(x), weight, Surroundings(bias=bias, residual=rows_of(residual)))
        around = Surroundings(bias=next_bias, activation=activation, norm_weight=norm_weight, epsilon=epsilon)
        return _product(hidden, next_weight, around), hidden
    normed, hidden = linear_norm(x, weight, bias, residual, norm_weight, epsilon)
    return _product(normed, next_weight, Surroundings(bias=next_bias, activation=activation)), hidden


def _product(x: torch.Tensor, weight: torch.Tensor, around: Surroundings, *, splittable: bool = False) -> torch.Tensor:
    """[rows, n], or, where it is splittable, perhaps the parts [splits, rows, n] without the bias."""
    rows, k = x.shape
    n = weight.shape[0] // (2 if around.activation else 1)
    named: dict[str, Any] = {"activation": around.activation, "splittable": splittable, "programmatic": is_programmatic(x)}
    tiles = tiles_for(rows, n, k, **named)
    if tiles is not None and tiles.wide and why_not_wide(x, weight, around.bias):
        tiles = tiles_for(rows, n, k, **named, wide=False)
    if tiles is not None:
        return launches.product(x, weight, around, tiles)
    assert around.norm_weight is None, "one row always has tiles"
    assert around.residual is None, "one row always has tiles"
    return cublas(x, weight, around.bias, around.activation)
