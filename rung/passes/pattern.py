"""Patterns: small torch functions that say what to look for, what to put there, and when.

A pattern is traced as the pieces are, with the same decompositions, so that it has the operations that a piece has. Numbers that are
arguments of the functions are captured where the graph has them and handed to the replacement; they are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rung.errors import PatternError
from rung.passes.identity import code_identity, digest, value_identity

Variant = Mapping[str, torch.dtype]  # the dtype of each tensor argument

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 0.13,  # one step of three mantissa bits
}


class Draw:
    """Random arguments for one run of a pattern. Sizes, numbers and the scale of the values differ between draws."""

    def __init__(self, variant: Variant, number: int) -> None:
        self.variant = variant
        self.number = number
        self._generator = torch.Generator().manual_seed(1 + number)
        self._scale = (1.0, 1e-3, 30.0)[number % 3]

    def size(self, base: int) -> int:
        """A size for a dimension, different in each draw."""
        return base + 2 * self.number

    def float(self, low: float, high: float) -> float:
        """A number for a constant."""
        return low + (high - low) * float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor for the argument `name`, in its dtype of this variant."""
        dtype = self.variant[name]
        if not dtype.is_floating_point:
            return torch.randint(0, 8, shape, generator=self._generator).to(dtype)
        return (torch.randn(shape, generator=self._generator) * self._scale).to(dtype)


@dataclass(frozen=True, slots=True)
class Match:
    """A place that fits, as the precondition sees it. Tensors are fake: shapes, strides and dtypes are known, values are not."""

    nodes: Mapping[str, fx.Node]  # tensor argument -> the node bound to it
    constants: Mapping[str, Any]

    def __getitem__(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.nodes[name].meta["val"]
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """`search` and `replacement` take the same arguments, by name: tensors, and numbers that are captured.

    Both return one tensor, or the same number of them. An operation inside `search` whose result is used elsewhere too prevents a match,
    unless `search` returns that result as well, or `shared` names the operation: then it stays and is computed twice. `precondition`
    returns why a place that fits must not be replaced, or None. `variants` are the dtypes that are looked for, each compared exactly;
    `example` draws the arguments for one of them. Nothing is global: a pattern acts where a pass that holds it runs."""

    name: str
    search: Callable[..., Any]
    replacement: Callable[..., Any]
    precondition: Callable[[Match], str | None]
    example: Callable[[Draw], Mapping[str, Any]]
    variants: tuple[Variant, ...]
    shared: tuple[str, ...] = ()  # names of operations, such as "convert_element_type"
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCES)

    def __post_init__(self) -> None:
        if not callable(self.precondition):
            raise PatternError(
                f"pattern {self.name!r} has no precondition", hint="say when the replacement is right; `always` if in every case"
            )
        if not self.variants:
            raise PatternError(f"pattern {self.name!r} has no variants", hint="give the dtypes of its tensor arguments")

    def uuid(self) -> str:
        """Identity of the source of all parts and of the parameters."""
        code = code_identity(self.search, self.replacement, self.precondition, self.example)
        parameters = [{**variant} for variant in self.variants], self.shared, sorted(self.tolerance.items(), key=str)
        return digest(self.name, code, value_identity(parameters, self.name))


def always(match: Match) -> str | None:
    """The precondition of a replacement that is right wherever the operations and dtypes fit."""
    return None


def each_dtype(*names: str, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)) -> tuple[Variant, ...]:
    """Variants in which all arguments have one dtype."""
    return tuple(dict.fromkeys(names, dtype) for dtype in dtypes)


def same_size(first: Any, second: Any) -> bool:
    """Whether two sizes, lists of sizes or strides are known to be equal; symbols are compared as expressions."""
    return str(first) == str(second)
