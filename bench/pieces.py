"""What cutting a decode step into pieces costs, one thing changed at a time: `python -m bench.pieces --out pieces.json`. Needs a GPU.

The step has the shape of an 8B decoder: 32 layers of qkv, o, gate/up, down through cuBLAS and three small Triton kernels, cut at attention
into 33 pieces. The break is a small copy kernel, or (`--attention`) rung's paged attention over 128 keys. Read the columns together:

* wall: from the start of a step to its end, the device idle before it. host: until everything is enqueued.
* device: between events around the step. ahead: the same with the host a whole step ahead, so nothing of it is the host's fault.
* busy: the kernels' own times; gaps: what lies between them, host ahead; cut: `ahead` over that of `full`, for each of the 32 breaks.

`device` far above `ahead` is a host that cannot keep up; `ahead` above `full` with equal `busy` is what a graph costs the device to
start; a higher `busy` or kernel count is work that the cut added.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from bench.pieces_variants import Step, Weights, Work, variants

AHEAD_CYCLES = 20_000_000  # about 10 ms in which the device waits and the host enqueues


@contextmanager
def events() -> Iterator[Callable[[], float]]:
    """Device time of the block in us, once it was synchronised."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    yield lambda: first.elapsed_time(last) * 1e3
    last.record()


def sample(works: Sequence[Work], row: dict[str, list[float]]) -> None:
    torch.cuda.synchronize()
    start = time.perf_counter()
    with events() as device:
        for work in works:
            work()
        enqueued = time.perf_counter()
    torch.cuda.synchronize()
    row["wall"].append((time.perf_counter() - start) * 1e6)
    row["host"].append((enqueued - start) * 1e6)
    row["device"].append(device())
    torch.cuda._sleep(AHEAD_CYCLES)
    with events() as device:
        for work in works:
            work()
    torch.cuda.synchronize()
    row["ahead"].append(device())


def kernels(works: Sequence[Work]) -> tuple[int, float, float]:
    """Kernels of a step, their times, and the time between the first and the last in which none ran; us, host ahead."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        torch.cuda._sleep(AHEAD_CYCLES)
        for work in works:
            work()
        torch.cuda.synchronize()
    spans = [event.time_range for event in recorded.events() if event.device_type == DeviceType.CUDA and "spin" not in event.name]
    spans.sort(key=lambda span: span.start)
    busy, idle, end = 0.0, 0.0, spans[0].start
    for span in spans:
        busy += span.end - span.start
        idle += max(0.0, span.start - end)
        end = max(end, span.end)
    return len(spans), busy, idle


def measure(step: Step, repeats: int) -> list[dict[str, Any]]:
    """One row for each variant, medians in us. Rounds are interleaved: every variant runs once in each."""
    chosen: list[tuple[str, list[Work]]] = []
    made = variants(step)
    while True:
        try:
            chosen.append(next(made))
        except StopIteration:
            break
        except Exception as error:
            print(f"stopped after {chosen[-1][0] if chosen else 'nothing'}: {type(error).__name__}: {error}")
            break
    samples = [{name: [] for name in ("wall", "host", "device", "ahead")} for _ in chosen]
    for works in (works for _, works in chosen for _ in range(3)):
        for work in works:
            work()
    for turn in range(repeats):
        for offset in range(len(chosen)):
            index = (turn + offset) % len(chosen)
            sample(chosen[index][1], samples[index])
    rows = []
    for (name, works), times in zip(chosen, samples, strict=True):
        count, busy, gaps = kernels(works)
        medians = {key: statistics.median(values) for key, values in times.items()}
        rows.append({"variant": name, "rows": step.rows, "calls": len(works), "kernels": count, "busy": busy, "gaps": gaps, **medians})
    by_name = {row["variant"]: row["ahead"] for row in rows}
    for row in rows:
        base = by_name["full, no break work" if "no break" in row["variant"] else "full"]
        row["cut"] = (row["ahead"] - base) / step.weights.layers
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,8,64")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--attention", action="store_true", help="paged attention as the break instead of a copy")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    weights = Weights(options.layers)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for size in map(int, options.sizes.split(",")):
            rows += measure(Step(weights, size, options.attention), options.repeats)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    columns = ("wall", "host", "device", "ahead", "busy", "gaps", "cut")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.layers} layers, us; break: ", end="")
    print("paged attention" if options.attention else "copies")
    print(f"{'B':>3} {'variant':42} {'calls':>5} {'kernels':>7} " + " ".join(f"{name:>7}" for name in columns))
    for row in rows:
        cells = " ".join(f"{row[name]:7.1f}" for name in columns)
        print(f"{row['rows']:3} {row['variant']:42} {row['calls']:5} {row['kernels']:7} {cells}")


if __name__ == "__main__":
    main()
