"""Each compiled piece against the same piece as it was traced, run eagerly on the same values.

The values are those of a run of the whole plan: what a piece is given is what it will be given, and errors do not add up over layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rung.compile.bound import BoundStep
from rung.compile.build import SplitGraph
from rung.compile.compiled import CompiledFunction
from rung.compile.pieces import Piece
from rung.compile.rounding import RELATIVE_ERROR_E4M3, float_dtypes
from rung.compile.selfcheck import is_uninitialised
from rung.graphs.verify import TOLERANCES, relative_error

_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceError:
    """The step of a unique piece whose results differ most, by the norm of the difference over the norm."""

    step: str
    uses: int
    error: float
    tolerance: float


def compare_pieces(compiled: CompiledFunction, traced: SplitGraph, inputs: Sequence[Any]) -> list[PieceError]:
    """One entry a unique piece. Runs the plan once, with each piece twice; what that run writes, such as a cache, it writes."""
    index_of = {step.name: step.piece for step in compiled.plan.steps if step.piece is not None}
    worst: dict[int, PieceError] = {}

    def run(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        index = index_of.get(step.name) if step.kind == "piece" else None
        if index is None:
            return step.call(arguments)
        piece = traced.pieces[index]
        want = piece.graph_module(*map(_copy, arguments))
        got = step.call(arguments)
        error = _error(piece, got, want)
        before = worst.get(index)
        if before is None or not error <= before.error:
            uses = sum(other.piece == index for other in compiled.plan.steps)
            worst[index] = PieceError(step=step.name, uses=uses, error=error, tolerance=_tolerance(piece))
        return got

    with torch.no_grad():
        compiled.run_steps(inputs, run)
    return [worst[index] for index in sorted(worst)]


def _error(piece: Piece, got: Sequence[Any], want: Sequence[Any]) -> float:
    outputs: Any = next(node for node in reversed(piece.graph_module.graph.nodes) if node.op == "output").args[0]
    pairs = [(mine, other) for node, mine, other in zip(outputs, got, want, strict=True) if not is_uninitialised(node)]
    return max((relative_error(_wide(mine), _wide(other)) for mine, other in pairs), default=0.0)


def _tolerance(piece: Piece) -> float:
    dtypes = float_dtypes(piece.graph_module.graph)
    if _E4M3 in dtypes:
        return RELATIVE_ERROR_E4M3
    halves = [TOLERANCES[dtype] for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)]
    return max(halves, default=TOLERANCES[torch.float32])


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == _E4M3 else value


def _copy(value: Any) -> Any:
    """A piece may write what it is given; parameters it reads."""
    return value.clone() if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) else value
