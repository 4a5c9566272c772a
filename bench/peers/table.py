"""The rows of all peers as one table beside the targets, and what their logs say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]

# ms a decode step by batch size: gate, goal, and the limit of the hardware, on one H200
STEP_TARGETS = {
    "8b": {1: (4.4, 4.0, 3.75), 8: (4.5, 4.1, 3.8), 64: (5.2, 4.8, 4.3), 256: (8.9, 8.3, 7.2)},
    "135m": {1: (0.75, 0.45, 0.30), 64: (1.0, 0.70, 0.45), 256: (1.6, 1.2, 0.8)},
}
# other rows: (model, kind, start, name of the row) to a text for gate and goal
OTHER_TARGETS = {
    ("8b", "cold", "build: compile"): (9.0, 6.0),
    ("8b", "warm", "build: compile"): (3.0, 1.0),
    ("8b", "cold", "build: capture"): (3.0, 2.0),
    ("8b", "cold", "import rung"): (0.2, 0.1),
}
PREFILL_PEAK = 790.0  # TFLOP/s, dense bf16 on random data
PREFILL_TARGETS = (0.70, 0.85)

_IN_LOGS = {  # lines of vLLM's log
    "log: trace": r"Dynamo bytecode transform time: ([\d.]+) s",
    "log: compile": r"torch\.compile (?:takes|took) ([\d.]+) s",
    "log: capture": r"Graph capturing finished in ([\d.]+) secs",
    "log: load weights": r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds",
    "log: engine": r"init engine .*? took ([\d.]+) s",
}
_GRAPH_MEMORY = r"Graph capturing finished in .*?took (-?[\d.]+) GiB"


def log_rows(text: str) -> list[dict[str, Any]]:
    """Phases and the memory of graphs from a log."""
    found: list[dict[str, Any]] = []
    for name, pattern in _IN_LOGS.items():
        if (match := re.search(pattern, text)) is not None:
            found.append({"kind": "phase", "name": name, "seconds": float(match.group(1))})
    if (match := re.search(_GRAPH_MEMORY, text)) is not None:
        found.append({"kind": "memory", "name": "graphs", "device_bytes": float(match.group(1)) * 2**30})
    return found


def render(rows: Rows) -> str:
    """Plain text: steps, prefill, start-up, memory, failures."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        parts += [_steps(model, of_model), _prefill(model, of_model), _phases(model, of_model), _memory(model, of_model)]
    failed = [f"{row['model']} {row['peer']} {row['start']}: {row['what']}: {row['error']}" for row in rows if row["kind"] == "failure"]
    return "\n\n".join(part for part in [*parts, "\n".join(failed)] if part)


def _steps(model: str, rows: Rows) -> str:
    steps = [row for row in rows if row["kind"] == "step"]
    columns = sorted({(row["context"], row["batch"]) for row in steps})
    if not columns:
        return ""
    lines = [("ms a step, wall / kernels", *(f"B={batch} at {context}" for context, batch in columns))]
    for peer in dict.fromkeys(row["peer"] for row in steps):
        found = {(row["context"], row["batch"]): row for row in steps if row["peer"] == peer}
        lines.append((peer, *(_step(found.get(column)) for column in columns)))
    targets = STEP_TARGETS.get(model, {})
    for at, name in enumerate(("gate", "goal", "limit")):
        lines.append((name, *(f"{targets[batch][at]:g}" if context == 128 and batch in targets else "-" for context, batch in columns)))
    best = [_ratio(steps, column) for column in columns]
    lines.append(("ours / best vLLM", *best))
    return _table(f"{model}: decode", lines)


def _step(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['wall_ms']:.3f} / {row['device_ms']:.3f}" if "device_ms" in row else f"{row['wall_ms']:.3f} / -"


def _ratio(steps: Rows, column: tuple[int, int]) -> str:
    at = [row for row in steps if (row["context"], row["batch"]) == column]
    ours = [row["wall_ms"] for row in at if row["peer"] == "ours"]
    theirs = [row["wall_ms"] for row in at if row["peer"].startswith("vllm")]
    return f"{min(ours) / min(theirs):.3f}" if ours and theirs else "-"


def _prefill(model: str, rows: Rows) -> str:
    lines = [
        (row["peer"], str(row["tokens"]), f"{row['ms']:.1f}", f"{row['tflops']:.0f}", f"{row['tflops'] / PREFILL_PEAK:.1%}")
        for row in rows
        if row["kind"] == "prefill"
    ]
    if not lines:
        return ""
    gate, goal = PREFILL_TARGETS
    lines.append(("gate, goal", "", "", "", f"{gate:.0%}, {goal:.0%}" if model == "8b" else "-"))
    return _table(f"{model}: one prompt", [("peer", "tokens", "ms", "TFLOP/s", "of 790"), *lines])


def _phases(model: str, rows: Rows) -> str:
    phases = [row for row in rows if row["kind"] == "phase"]
    lines = []
    for peer in dict.fromkeys(row["peer"] for row in phases):
        of_peer = [row for row in phases if row["peer"] == peer]
        for name in dict.fromkeys(row["name"] for row in of_peer):
            seconds = {row["start"]: row["seconds"] for row in of_peer if row["name"] == name}
            goals = [
                f"{start} {gate:g}, {goal:g}"
                for (of, start, phase), (gate, goal) in OTHER_TARGETS.items()
                if peer == "ours" and of == model and phase == name
            ]
            lines.append(
                (peer, name, *(f"{seconds[start]:.2f}" if start in seconds else "-" for start in ("cold", "warm")), "; ".join(goals))
            )
    return _table(f"{model}: start-up, s", [("peer", "phase", "cold", "warm", "gate, goal"), *lines]) if lines else ""


def _memory(model: str, rows: Rows) -> str:
    lines = [
        (row["peer"], row["name"], f"{row['device_bytes'] / 2**30:.2f}", f"{row.get('peak_bytes', 0) / 2**30:.2f}")
        for row in rows
        if row["kind"] == "memory" and row["start"] == "cold"
    ]
    return _table(f"{model}: memory, GiB", [("peer", "when", "device", "peak of tensors"), *lines]) if lines else ""


def _table(title: str, lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    body = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *body])
