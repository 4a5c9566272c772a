"""Step time over batch sizes and over contexts, as CSV and, with matplotlib (`pip install 'rung[plots]'`), as a plot.

    python -m bench.sweep --model 8b --peers ours --out sweep                                  # ours alone
    python -m bench.sweep --model 8b --peers ours,vllm --vllm-path DIR:SITE --out sweep        # both, each in its own process
    python -m bench.sweep --draw sweep/batches.json sweep/contexts.json --out sweep            # only CSV and plot, from what there is

Runs `bench.peers` twice: B = 1 to 512 behind 128 tokens, then one request and `--context-batch` behind 128 to 32k tokens. Models of
random weights get the positions that they need.
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
BATCHES = "1,2,4,8,16,24,32,48,64,96,128,160,192,256,320,384,448,512"
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
FIELDS = ("model", "peer", "batch", "context", "wall_ms", "min_ms", "max_ms", "device_ms")


def measure(options: argparse.Namespace, out: Path, batches: str, contexts: str) -> None:
    """Rows of `bench.peers` into `out`."""
    command = [sys.executable, "-m", "bench.peers", "--models", options.model, "--peers", options.peers, "--no-warm", "--prefill", "0"]
    command += ["--batches", batches, "--contexts", contexts, "--rounds", str(options.rounds), "--long", str(options.long)]
    command += ["--time-limit", str(options.time_limit), "--out", str(out), "--memory", str(options.memory)]
    command += ["--vllm-path", options.vllm_path] if options.vllm_path else []
    command += ["--positions", str(max(map(int, contexts.split(","))) + options.long)]
    subprocess.run(command, cwd=ROOT, check=False)


def steps(paths: Sequence[Path]) -> list[dict[str, Any]]:
    rows = [row for path in paths if path.exists() for row in json.loads(path.read_text()) if row["kind"] == "step"]
    return sorted(rows, key=lambda row: (row["model"], row["peer"], row["context"], row["batch"]))


def draw(rows: Sequence[dict[str, Any]], out: Path) -> str | None:
    """A plot over batches and one over contexts; None, or why there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "matplotlib is not installed"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for peer in dict.fromkeys(row["peer"] for row in rows):
        mine = [row for row in rows if row["peer"] == peer]
        over_batches = [row for row in mine if row["context"] == min(one["context"] for one in mine)]
        _line(left, over_batches, "batch", peer)
        for batch in dict.fromkeys(row["batch"] for row in mine):
            over_contexts = [row for row in mine if row["batch"] == batch]
            if len(over_contexts) > 1:
                _line(right, over_contexts, "context", f"{peer}, B={batch}")
    for axes, label in ((left, "requests"), (right, "tokens behind each")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.set_ylabel("ms a decode step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.tight_layout()
    figure.savefig(out)
    return None


def _line(axes: Any, rows: Sequence[dict[str, Any]], over: str, label: str) -> None:
    ordered = sorted(rows, key=lambda row: row[over])
    places = [row[over] for row in ordered]
    axes.plot(places, [row["wall_ms"] for row in ordered], marker="o", markersize=3, label=label)
    axes.fill_between(places, [row["min_ms"] for row in ordered], [row["max_ms"] for row in ordered], alpha=0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(HF_CONFIGS))
    parser.add_argument("--peers", default="ours")
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--context-batch", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=80)
    parser.add_argument("--memory", type=float, default=0.8)
    parser.add_argument("--time-limit", type=float, default=280, help="seconds for each process")
    parser.add_argument("--vllm-path")
    parser.add_argument("--draw", type=Path, nargs="+", help="JSON files of bench.peers to draw instead of measuring")
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="a folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    paths = options.draw
    if paths is None:
        paths = [options.out / "batches.json", options.out / "contexts.json"]
        if options.batches:
            measure(options, paths[0].resolve(), options.batches, "128" if options.model != "tiny" else "8")
        if options.contexts:
            measure(options, paths[1].resolve(), options.context_batch, options.contexts)
    rows = steps(paths)
    with (options.out / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)
    why = draw(rows, options.out / "sweep.png")
    print(f"{len(rows)} rows in {options.out / 'sweep.csv'}" + ("" if why is None else f"; no plot: {why}"))


if __name__ == "__main__":
    main()
