"""A gated activation becomes one op: SiLU as in Llama, GELU (tanh form) as in Gemma.

Gate and factor may be two tensors, or the halves of one, as one joined projection gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.fused_ops import GELU_MUL, SILU_MUL
from rung.passes.ir import IROp, gelu_and_mul, silu_and_mul
from rung.passes.pattern import Draw, Match, Pattern, each_dtype, same_size
from rung.passes.pattern_pass import PatternPass


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _example(draw: Draw) -> Mapping[str, Any]:
    width = draw.size(8)
    return {"gate": draw.tensor("gate", 3, width), "up": draw.tensor("up", 3, width)}


def _precondition(match: Match) -> str | None:
    gate, up = match["gate"], match["up"]
    if not same_size(tuple(gate.shape), tuple(up.shape)):
        return f"the gate has shape {tuple(gate.shape)} and the other factor {tuple(up.shape)}"
    return None


def _halves_example(draw: Draw) -> Mapping[str, Any]:
    half = draw.size(8)
    return {"x": draw.tensor("x", 3, 2 * half), "half": half}


def _halves_precondition(match: Match) -> str | None:
    half, width = match.constants["half"], match["x"].shape[-1]
    return None if same_size(2 * half, width) else f"parts of {half} are not the halves of {width}"


def _two(name: str, search: Callable[..., Any], op: IROp) -> Pattern:
    overload = op.overload

    def replacement(gate: torch.Tensor, up: torch.Tensor) -> Any:
        return overload(gate, up)

    return Pattern(
        name=name,
        search=search,
        replacement=replacement,
        precondition=_precondition,
        example=_example,
        variants=each_dtype("gate", "up"),
        shared=("convert_element_type",),
    )


def _halves(name: str, search: Callable[..., Any], op: Callable[[torch.Tensor], torch.Tensor]) -> Pattern:
    def halved(x: torch.Tensor, half: int) -> Any:
        return search(*x.split(half, dim=-1))

    def replacement(x: torch.Tensor, half: int) -> Any:
        return op(x)

    return Pattern(
        name=name,
        search=halved,
        replacement=replacement,
        precondition=_halves_precondition,
        example=_halves_example,
        variants=each_dtype("x"),
        shared=("convert_element_type",),
    )


def act_mul() -> PatternPass:
    patterns = (
        _halves("silu_and_mul", _silu, silu_and_mul),
        _halves("gelu_and_mul", _gelu, gelu_and_mul),
        _two("silu_mul", _silu, SILU_MUL),
        _two("gelu_mul", _gelu, GELU_MUL),
    )
    return PatternPass("act_mul", patterns)
