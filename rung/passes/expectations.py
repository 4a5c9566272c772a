"""Matches that a configuration counts on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rung.errors import CompileError
from rung.passes.report import NearMiss, merged


def counts_of(report: Mapping[str, Any]) -> dict[str, int]:
    """Matches of one piece by pass and by pattern. A pass that is called like its pattern is counted once, and so is an op that a pattern
    of its name put there and that was lowered."""
    passes = {
        name: {what: count for what, count in found.items() if not what.startswith("near miss")}
        for name, found in report.items()
        if isinstance(found, Mapping)
    }
    lowered = passes.get("lowering", {})
    patterns = merged(found for name, found in passes.items() if name != "lowering")
    return lowered | patterns | {name: sum(found.values()) for name, found in passes.items()}


def check_expectations(expect: Mapping[str, int], pieces: Iterable[tuple[Mapping[str, Any], int]]) -> None:
    """Raise `CompileError` when the whole graph has fewer matches than `expect` says. `pieces` are reports, and how often each is used."""
    reports = list(pieces)
    total = merged({name: count * uses for name, count in counts_of(report).items()} for report, uses in reports)
    for name, least in expect.items():
        found = total.get(name, 0)
        if found < least:
            known = "" if name in total or not total else f" No pass and no pattern has this name; there are {', '.join(sorted(total))}."
            missed = [miss for report, _ in reports for miss in _misses(report, name)]
            listed = "; ".join(str(miss) for miss in missed[:3])
            raise CompileError(
                f"{name} was expected to match {least} times and matched {found} times.{known}"
                + (f" Near misses: {listed}" if listed else ""),
                hint="`rung explain passes` shows all matches and near misses; lower `expect` if the change is intended",
            )


def _misses(report: Mapping[str, Any], name: str) -> Sequence[NearMiss]:
    patterns = {name, *report.get(name, {})}
    return [NearMiss(**miss) for miss in report.get("near_misses", ()) if miss["pattern"] in patterns]
