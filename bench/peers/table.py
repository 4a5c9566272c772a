"""The rows of all peers as tables beside the targets, narrow and few, and what their logs say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Rows = Sequence[Row]

# ms a decode step by batch size: gate, goal, and the limit of the hardware, on one H200
STEP_TARGETS: dict[str, dict[int, tuple[float, float, float]]] = {
    "8b": {1: (4.4, 4.0, 3.75), 8: (4.5, 4.1, 3.8), 64: (5.2, 4.8, 4.3), 256: (8.9, 8.3, 7.2)},
    "135m": {1: (0.75, 0.45, 0.30), 64: (1.0, 0.70, 0.45), 256: (1.6, 1.2, 0.8)},
    "8b-fp8": {1: (2.8, 2.45, 1.91), 256: (6.0, 5.0, 3.3)},
}
# of seconds of our start, by (model, start, phase)
START_TARGETS = {
    ("8b", "cold", "compile"): "goal 6",
    ("8b", "cold", "compile without imports"): "gate 9",
    ("8b", "warm", "compile"): "gate 3, goal 1",
    ("8b", "cold", "capture"): "gate 3, goal 2",
    ("8b", "cold", "import rung"): "gate 0.2, goal 0.1",
}
HOST_TARGETS = {("135m", 1): (600, 300), ("135m", 256): (1400, 900)}  # us of a step
PREFILL_PEAK = 790.0  # TFLOP/s, dense bf16 on random data

_ORDER = ("ours", "vllm", "vllm-processes", "reduce-overhead", "transformers")
_IN_LOGS = {  # lines of vLLM's log
    "log: trace": r"Dynamo bytecode transform time: ([\d.]+) s",
    "log: compile": r"torch\.compile (?:takes|took) ([\d.]+) s",
    "log: capture": r"Graph capturing finished in ([\d.]+) secs",
    "log: load weights": r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds",
    "log: engine": r"init engine .*? took ([\d.]+) s",
}
_GRAPH_MEMORY = r"Graph capturing finished in .*?took (-?[\d.]+) GiB"
# of a start, in its order; what is not of a peer is left out
_PHASES = (
    "import torch, import rung, import rung.models, import vllm, import transformers, look at the model, weights, build, build: compile, "
    "compile without imports, compile: import Inductor, compile: import Dynamo, build: capture, log: trace, log: compile, log: capture, "
    "log: engine, first token, ready"
)


def log_rows(text: str) -> list[Row]:
    """Phases and the memory of graphs from a log."""
    found: list[Row] = []
    for name, pattern in _IN_LOGS.items():
        if (match := re.search(pattern, text)) is not None:
            found.append({"kind": "phase", "name": name, "seconds": float(match.group(1))})
    if (match := re.search(_GRAPH_MEMORY, text)) is not None:
        found.append({"kind": "memory", "name": "graphs", "device_bytes": float(match.group(1)) * 2**30})
    return found


def render(rows: Rows) -> str:
    """Plain text: for each model steps, other figures, start-up and memory; then the sweep and what failed."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        parts += [part(model, of_model) for part in (_steps, _other, _starts, _sweep)]
    failed = [
        f"{row['model']} {row['peer']} {row['start']}: {row['what']}: {row['error']}"[:600] for row in rows if row["kind"] == "failure"
    ]
    return "\n\n".join(part for part in [*parts, "\n".join(failed)] if part)


def _of(rows: Rows, kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _peers(rows: Iterable[Row]) -> list[str]:
    """Ours first, the others in one order, whichever ended first."""
    return sorted({row["peer"] for row in rows}, key=lambda peer: (_ORDER.index(peer) if peer in _ORDER else len(_ORDER), peer))


def _steps(model: str, rows: Rows) -> str:
    """Wall time, its spread where it is beyond 1 %, and the time in which the device was busy."""
    steps = _of(rows, "step")
    columns = sorted({row["batch"] for row in steps})
    if not columns:
        return ""
    busy = {(row["peer"], row["batch"]): row for row in _of(rows, "kernels")}
    lines = [(f"{model}: ms a step | busy", *(f"B={batch}" for batch in columns))]
    for peer in _peers(steps):
        found = {row["batch"]: row for row in steps if row["peer"] == peer}
        device = next((row["device"] for row in found.values()), "")
        cells = (_step(found.get(batch), busy.get((peer, batch))) for batch in columns)
        lines.append((f"{peer} (device {device})" if device else peer, *cells))
    for at, name in enumerate(("gate", "goal", "limit")):
        if targets := STEP_TARGETS.get(model):
            lines.append((name, *(f"{targets[batch][at]:g}" if batch in targets else "-" for batch in columns)))
    if any(row["peer"].startswith("vllm") for row in steps):
        lines.append(("ours / best vLLM", *(_ratio([row for row in steps if row["batch"] == batch]) for batch in columns)))
    kernels = [busy.get(("ours", batch)) for batch in columns]
    lines.append(("ours, kernels a step", *("-" if row is None else f"{row['kernels']:.0f}" for row in kernels)))
    return _table(lines)


def _step(row: Row | None, busy: Row | None) -> str:
    if row is None:
        return "-"
    wide = row["max_ms"] - row["min_ms"] > 0.01 * row["wall_ms"]
    spread = f" ({row['min_ms']:.3f} to {row['max_ms']:.3f})" if wide else ""
    return f"{row['wall_ms']:.3f}{spread} | " + ("-" if busy is None else f"{busy['device_ms']:.3f}")


def _ratio(rows: Rows) -> str:
    ours = [row["wall_ms"] for row in rows if row["peer"] == "ours"]
    theirs = [row["wall_ms"] for row in rows if row["peer"].startswith("vllm")]
    return f"{min(ours) / min(theirs):.3f}" if ours and theirs else "-"


def _other(model: str, rows: Rows) -> str:
    """A line for each figure beside its gate and goal."""
    gated = model == "8b"
    lines = [
        f"{row['peer']}: prompt of {row['tokens']}: {row['ms']:.1f} ms, {row['tflops']:.0f} TFLOP/s, {row['tflops'] / PREFILL_PEAK:.1%}"
        + (" (gate 70 %, goal 85 %)" if gated else "")
        for row in _of(rows, "prefill")
    ]
    beside = " (gate 1.06, goal 1.03)" if gated else ""
    lines += [f"{row['peer']}: {row['name']}: {row['value']:.3f}{beside}" for row in _of(rows, "ratio")]
    for row in _of(rows, "host"):
        targets = HOST_TARGETS.get((model, row["batch"]))
        beside = f" (gate {targets[0]}, goal {targets[1]})" if targets else ""
        lines.append(f"{row['peer']}: host us a step at {row['batch']}: {row['us']:.0f}{beside}")
    for row in _of(rows, "graphs"):
        if row["start"] == "cold":
            graphs = " + ".join(f"{count} {mode}" for mode, count in row["count"].items())
            predicted = "" if row["predicted"] is None else f", predicted {row['predicted'] / 2**30:.3f}"
            beside = " (gate 3 s, 0.45 GiB within 10 %; goal 2 s, 0.30)" if gated else ""
            lines.append(f"{row['peer']}: {graphs} graphs: {row['seconds']:.2f} s, {row['bytes'] / 2**30:.3f} GiB{predicted}{beside}")
    memory = [row for row in _of(rows, "memory") if row["start"] == "cold"]
    for peer in _peers(memory):
        mine = [f"{row['name']} {row['device_bytes'] / 2**30:.2f}" for row in memory if row["peer"] == peer]
        lines.append(f"{peer}: GiB of the device: " + ", ".join(mine))
    return "\n".join(f"{model}, {line}" for line in lines)


def _starts(model: str, rows: Rows) -> str:
    """A line for each start."""
    phases = _of(rows, "phase")
    lines = []
    for peer, start in ((peer, start) for peer in _peers(phases) for start in ("cold", "warm")):
        found = {row["name"]: row["seconds"] for row in phases if (row["peer"], row["start"]) == (peer, start)}
        if imports := [seconds for name, seconds in found.items() if name.startswith("compile: import ")]:
            found["compile without imports"] = found["build: compile"] - sum(imports)
        parts: list[str] = []
        for name in (name for name in _PHASES.split(", ") if name in found):
            short = name.split(": ")[-1]
            target = START_TARGETS.get((model, start, short)) if peer == "ours" and not name.startswith("log") else None
            if target or found[name] >= 0.005:
                parts.append(f"{short} {found[name]:.2f}" + (f" ({target})" if target else ""))
        lines += [f"{model}, {peer} {start}, s: " + ", ".join(parts)] if parts else []
    return "\n".join(lines)


def _sweep(model: str, rows: Rows) -> str:
    """A line for each point; `*` marks three parts of one run, else there are three runs."""
    found = _of(rows, "sweep")
    peers = _peers(found)
    if not found:
        return ""
    lines = [(f"{model}: sweep, ms (least to most)", *peers, "ours / vLLM")]
    least = min(row["context"] for row in found)

    def place(row: Row) -> tuple[bool, int, int]:
        return row["context"] != least, row["batch"], row["context"]

    for _, batch, context in dict.fromkeys(place(row) for row in sorted(found, key=place)):
        at = {row["peer"]: row for row in found if (row["batch"], row["context"]) == (batch, context)}
        cells = [
            "-" if row is None else f"{row['wall_ms']:.3f} ({row['min_ms']:.3f} to {row['max_ms']:.3f})" + "*" * (row["runs"] == "parts")
            for row in map(at.get, peers)
        ]
        lines.append((f"B={batch} at {context}", *cells, _ratio(list(at.values()))))
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
