"""What `rung generate` says after the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.cli.console import console, table
from rung.cli.steps import other_counts, step_rows
from rung.graphs import MemoryReport
from rung.runner.memory_plan import MemoryPlan


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
    graph_memory: MemoryReport | None = None
    store: str = ""  # what the artifact store had, and the seconds that saved; empty without a compile
    memory_plan: MemoryPlan | None = None  # how the KV cache was sized, when memory decided

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
            "store": self.store,
            "counters": other_counts(self.counts),
            "graph_memory": None if self.graph_memory is None else self.graph_memory.as_json(),
            "memory_plan": None if self.memory_plan is None else self.memory_plan.as_json(),
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
    if summary.store:
        out.print(f"store: {summary.store}")
    if summary.graph_memory is not None:
        out.print(f"graph memory: {summary.graph_memory}")
    if summary.memory_plan is not None:
        out.print(f"memory: {summary.memory_plan}")
    out.print(
        f"{summary.prompt_tokens} prompt tokens, {summary.generated_tokens} generated in {summary.seconds:.2f} s: "
        f"{summary.tokens_per_second:.1f} tokens/s ({summary.model}, {summary.mode}, {summary.device})"
    )
