"""A pattern and its replacement, run on generated arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rung.errors import PatternError
from rung.passes.pattern import TOLERANCES, Pattern
from rung.passes.pattern_graph import draws


def check_pattern(pattern: Pattern) -> None:
    """Raise `PatternError` when the replacement differs from the pattern beyond the tolerance, in any variant and draw."""
    for variant in pattern.variants:
        for number, values in enumerate(draws(pattern, variant)):
            tensors = ", ".join(f"{name} {_layout(value)}" for name, value in values.items() if isinstance(value, torch.Tensor))
            try:
                with torch.no_grad():
                    want, got = (_flat(function(**_copies(values))) for function in (pattern.search, pattern.replacement))
            except (RuntimeError, TypeError, ValueError) as error:
                raise PatternError(
                    f"pattern {pattern.name!r} cannot run on its example {number} ({tensors}): {type(error).__name__}: {error}",
                    hint="both functions must take the arguments of the example, by name",
                ) from error
            if len(want) != len(got):
                raise PatternError(
                    f"pattern {pattern.name!r} returns {len(want)} results, its replacement {len(got)}", hint="return the same results"
                )
            for index, (one, other) in enumerate(zip(want, got, strict=True)):
                _compare(pattern, f"result {index} on example {number} ({tensors})", one, other)


def _compare(pattern: Pattern, what: str, want: torch.Tensor, got: torch.Tensor) -> None:
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        raise PatternError(
            f"pattern {pattern.name!r}: {what} is {_layout(want)}, the replacement gives {_layout(got)}", hint="convert the result"
        )
    allowed = pattern.tolerance.get(want.dtype, TOLERANCES.get(want.dtype, 0.0))
    wide, other = want.double(), got.double()
    unequal = wide.isfinite() != other.isfinite()
    difference = torch.where(unequal, float("inf"), (wide - other).abs().nan_to_num(0.0))
    scale = wide[wide.isfinite()].abs().max() if wide.isfinite().any() else torch.tensor(1.0)
    error = float((difference / scale.clamp_min(1e-30)).max()) if difference.numel() else 0.0
    if error > allowed:
        raise PatternError(
            f"pattern {pattern.name!r}: {what} differs from the replacement by {error:.2g} of the largest value; {allowed:.2g} is allowed",
            hint="mend the replacement, or state a `tolerance` for the dtype with a reason",
        )


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _flat(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _layout(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
