"""Decode steps and module calls in every mode, for one table: the same measurement as `rung bench`, several targets in one run.

    python -m bench.latency --out latency.json                        # llama-8b and smollm2-135m, random weights, on a GPU
    python -m bench.latency --target tiny --sizes 1,4 --repeats 3     # anywhere

The figures stand beside the targets in docs/performance.md, with the device, the versions, the command and the date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rung.cli.assembly import open_decoder
from rung.cli.bench_decoder import DecoderBench
from rung.cli.options import resolve_device, resolve_dtype

MODES = ("eager", "compiled", "piecewise", "full")


def measure_target(target: str, sizes: list[int], repeats: int, sets: int) -> list[dict[str, object]]:
    """One row for each size and mode, times in ms."""
    device = resolve_device("auto")
    decoder = open_decoder(target, resolve_dtype("auto", device), device, shapes=True)
    bench = DecoderBench(decoder, sizes, MODES, context=128, repeats=repeats, sets=sets, max_model_len=None)
    return [{"target": target, "size": size, "mode": m, **t.as_json()} for size in sizes for m, t in bench.run(size).items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="default: llama-8b and smollm2-135m")
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    rows = [
        row
        for target in arguments.target or ("llama-8b", "smollm2-135m")
        for row in measure_target(target, sizes, arguments.repeats, arguments.sets)
    ]
    for row in rows:
        cells = (f"{name} {row[name]:.3f}" for name in ("step_ms", "host_ms", "device_ms", "busy_ms") if row[name] is not None)
        print(f"{row['target']:14} {row['size']:4} {row['mode']:10} {', '.join(cells)}; ran {row['ran']}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
