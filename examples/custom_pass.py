"""A pass of your own: a pattern, its replacement, when it is right, and a compile that fails when it is lost.

python examples/custom_pass.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import rung
from rung.passes.pattern import Draw, Pattern, always, each_dtype
from rung.passes.pattern_pass import PatternPass


def scaled_twice(x: torch.Tensor, first: float, second: float) -> torch.Tensor:
    """What to look for. Tensors and numbers are arguments: numbers are captured where they are found, never compared."""
    return x * first * second


def scaled_once(x: torch.Tensor, first: float, second: float) -> torch.Tensor:
    """What to put there. It is run against the pattern on arguments of `example` before a piece is changed."""
    return x * (first * second)


def example(draw: Draw) -> Mapping[str, Any]:
    return {"x": draw.tensor("x", draw.size(4)), "first": draw.float(0.5, 2.0), "second": draw.float(0.5, 2.0)}


def make_pass() -> PatternPass:
    pattern = Pattern(
        name="scale",
        search=scaled_twice,
        replacement=scaled_once,
        precondition=always,  # or a function that says why a place must be left alone
        example=example,
        variants=each_dtype("x", dtypes=(torch.float32,)),
    )
    return PatternPass("join_scales", (pattern,))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 3.0 * 0.25).exp()


def main() -> None:
    module = rung.wrap(Scaled(), dynamic={"x": {0: "rows"}}, passes=(make_pass,), expect={"scale": 1})
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), Scaled()(x))
    print(module.rung.report()[0]["passes"][0]["join_scales"])


if __name__ == "__main__":
    main()
