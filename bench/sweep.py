"""Step time over batch sizes and over contexts alone, as CSV and, with matplotlib (`pip install 'rung[plots]'`), as a plot.

    python -m bench.sweep --model 8b --peers ours --out sweep                                   # ours alone
    python -m bench.sweep --model 8b --peers ours,vllm --vllm-path DIR:SITE --out sweep         # both, one after the other on one device
    python -m bench.sweep --draw sweep/sweep.json --out sweep                                   # only CSV and plot

Runs `bench.peers` with a cold start of each peer and nothing but the sweep (`--plan`: what that takes). Models of random weights get the
positions that they need.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.shapes import HF_CONFIGS

ROOT = Path(__file__).parents[1]
# behind 128 tokens, so that the sweep over contexts begins there
BATCHES = "1,2,4,8,16,32,48,64,96,128,192,256,384,512"
CONTEXTS = "512,1024,2048,4096,8192,16384,32768"
FIELDS = ("model", "peer", "device", "batch", "context", "wall_ms", "min_ms", "max_ms", "runs", "max_model_len")


def points(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the sweep."""
    found = [row for row in rows if row["kind"] == "sweep"]
    return sorted(found, key=lambda row: (row["model"], row["peer"], row["context"], row["batch"]))


def write(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    """The sweep as `sweep.csv` and `sweep.png` in the folder; says what was written."""
    found = points(rows)
    if not found:
        return "no row of a sweep"
    with (folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(found)
    why = draw(found, folder / "sweep.png")
    return f"{len(found)} rows in sweep.csv" + (", drawn in sweep.png" if why is None else f"; no plot: {why}")


def draw(rows: Sequence[dict[str, Any]], out: Path) -> str | None:
    """A plot over batches and one over contexts, of one model; None, or why there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "matplotlib is not installed"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for model, peer in dict.fromkeys((row["model"], row["peer"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["peer"]) == (model, peer)]
        least = min(row["context"] for row in mine)
        _line(left, [row for row in mine if row["context"] == least], "batch", f"{peer}, {model}")
        for batch in sorted({row["batch"] for row in mine}):
            over_contexts = [row for row in mine if row["batch"] == batch]
            if len({row["context"] for row in over_contexts}) > 1:
                _line(right, over_contexts, "context", f"{peer}, {model}, B={batch}")
    for axes, label in ((left, "requests"), (right, "tokens behind each")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.set_ylabel("ms a decode step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)
    return None


def _line(axes: Any, rows: Sequence[dict[str, Any]], over: str, label: str) -> None:
    """One place may have been measured in two engines: the later row is drawn."""
    ordered = sorted({row[over]: row for row in rows}.values(), key=lambda row: row[over])
    places = [row[over] for row in ordered]
    axes.plot(places, [row["wall_ms"] for row in ordered], marker="o", markersize=3, label=label)
    axes.fill_between(places, [row["min_ms"] for row in ordered], [row["max_ms"] for row in ordered], alpha=0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(HF_CONFIGS))
    parser.add_argument("--peers", default="ours")
    parser.add_argument("--devices", default="")
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--contexts", default=CONTEXTS)
    parser.add_argument("--context-batch", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=80)
    parser.add_argument("--memory", type=float, default=0.7)
    parser.add_argument("--seconds", type=float, default=580, help="for all processes")
    parser.add_argument("--time-limit", type=float, default=330, help="seconds for each process on its device")
    parser.add_argument("--plan", action="store_true", help="print what would run and stop")
    parser.add_argument("--vllm-path")
    parser.add_argument("--draw", type=Path, nargs="+", help="JSON files of bench.peers to draw instead of measuring")
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="a folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.draw:
        print(write([row for path in options.draw for row in json.loads(path.read_text())], options.out))
        return
    least = min([int(size) for size in options.batches.split(",") if size] or [1])
    command = [sys.executable, "-m", "bench.peers", "--models", options.model, "--full-models", options.model, "--no-warm"]
    command += ["--peers", options.peers, "--devices", options.devices, "--prefill", "0", "--batches", str(least)]
    command += ["--sweep-batches", options.batches, "--sweep-contexts", options.contexts, "--context-batches", options.context_batch]
    command += ["--sweep-long", str(options.long), "--rounds", str(options.rounds), "--memory", str(options.memory)]
    command += ["--seconds", str(options.seconds), "--time-limit", str(options.time_limit), *(["--plan"] if options.plan else [])]
    command += ["--out", str((options.out / "sweep.json").resolve())]
    command += ["--vllm-path", options.vllm_path] if options.vllm_path else []
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
