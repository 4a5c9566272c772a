"""Counters as tables: steps by mode and reason, and everything else that was counted."""

from __future__ import annotations

from collections.abc import Mapping


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The counts that grew between two snapshots, by how much."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def step_rows(counts: Mapping[str, int]) -> list[tuple[str, str, str, int]]:
    """(mode, reason, its sentence, steps) from counts named `step.<mode>.<reason>`, the most frequent first."""
    from rung.graphs.reasons import Reason

    rows = []
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        kind, _, rest = name.partition(".")
        mode, _, reason = rest.partition(".")
        if kind == "step":
            sentence = Reason(reason).sentence if reason in Reason.__members__.values() else reason
            rows.append((mode, reason, sentence, count))
    return rows


def other_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Everything but the steps."""
    return {name: count for name, count in sorted(counts.items()) if not name.startswith("step.")}
