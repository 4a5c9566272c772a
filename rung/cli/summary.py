"""What `rung generate` says after the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.cli.console import console, table
from rung.cli.steps import other_counts, step_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`seconds` is the time from the first step to the last token, `phases` what came before and the first token."""

    model: str
    mode: str
    device: str
    phases: Mapping[str, float]
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    counts: Mapping[str, int]

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "mode": self.mode,
            "device": self.device,
            "phases_seconds": dict(self.phases),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "steps": {f"{mode}.{reason}": count for mode, reason, _, count in step_rows(self.counts)},
            "counters": other_counts(self.counts),
        }


def print_summary(summary: Summary) -> None:
    """To the error stream, so that the output holds nothing but text."""
    out = console(err=True)
    out.print()
    rows = [(name, f"{seconds:.2f} s") for name, seconds in summary.phases.items()]
    out.print(table("start-up", ("phase", "time"), rows, numbers=("time",)))
    steps = [(mode, sentence, count) for mode, _, sentence, count in step_rows(summary.counts)]
    out.print(table("steps", ("mode", "why", "steps"), steps, numbers=("steps",)))
    counted = ", ".join(f"{name} {count}" for name, count in other_counts(summary.counts).items())
    out.print(f"counters: {counted}")
    out.print(
        f"{summary.prompt_tokens} prompt tokens, {summary.generated_tokens} generated in {summary.seconds:.2f} s: "
        f"{summary.tokens_per_second:.1f} tokens/s ({summary.model}, {summary.mode}, {summary.device})"
    )
