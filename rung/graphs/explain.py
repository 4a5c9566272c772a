"""Steps in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rung.graphs.dispatch import Dispatch
from rung.graphs.reasons import Reason


def as_dict(dispatch: Dispatch) -> dict[str, Any]:
    """One step: how it ran, the padding in rows, and why not better."""
    return {
        "mode": str(dispatch.descriptor.mode),
        "descriptor": str(dispatch.descriptor),
        "padding": dispatch.padding,
        "reason": str(dispatch.reason),
        "why": dispatch.reason.sentence,
        "advice": dispatch.reason.advice,
    }


def step_lines(counts: Mapping[str, int]) -> list[str]:
    """One line for each mode and reason among counts named `step.<mode>.<reason>`, the most frequent first."""
    lines = []
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        kind, _, rest = name.partition(".")
        mode, _, reason = rest.partition(".")
        if kind == "step":
            lines.append(f"{count} steps {mode}: {Reason(reason).sentence} (to do: {Reason(reason).advice})")
    return lines
