"""A gated activation becomes one op: SiLU as in Llama, GELU (tanh form) as in Gemma."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rung.passes.fused_ops import GELU_AND_MUL, SILU_AND_MUL
from rung.passes.pattern import Draw, Match, Pattern, each_dtype, same_size
from rung.passes.pattern_pass import PatternPass


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _silu_op(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = SILU_AND_MUL.overload(gate, up)
    return result


def _gelu_op(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = GELU_AND_MUL.overload(gate, up)
    return result


def _example(draw: Draw) -> Mapping[str, Any]:
    width = draw.size(8)
    return {"gate": draw.tensor("gate", 3, width), "up": draw.tensor("up", 3, width)}


def _precondition(match: Match) -> str | None:
    gate, up = match["gate"], match["up"]
    if not same_size(tuple(gate.shape), tuple(up.shape)):
        return f"the gate has shape {tuple(gate.shape)} and the other factor {tuple(up.shape)}"
    return None


def _pattern(name: str, search: Any, replacement: Any) -> Pattern:
    return Pattern(
        name=name,
        search=search,
        replacement=replacement,
        precondition=_precondition,
        example=_example,
        variants=each_dtype("gate", "up"),
        shared=("convert_element_type",),
    )


def act_mul() -> PatternPass:
    return PatternPass("act_mul", (_pattern("silu_and_mul", _silu, _silu_op), _pattern("gelu_and_mul", _gelu, _gelu_op)))
