"""The host's critical path of a full replay: dispatch, the manager's checks, the launch. Needs a GPU.

    python -m bench.replay --target llama-8b --requests 8 --out replay.json

Bursts of replays with the device idle before each; medians over bursts, us a replay. The sweep of addresses runs behind the launch and is a
row of its own. The batch is empty, so the device's work is that of padded rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rung.cli.assembly import open_decoder
from rung.cli.options import resolve_device, resolve_dtype
from rung.graphs import GraphMode, Shape
from rung.runner import RunnerConfig, build_runner
from rung.runner.graph_forward import GraphForward

BURST, ROUNDS = 8, 40


def burst_us(call: Callable[[], object]) -> float:
    """Median us a call over bursts; the device is idle when a burst begins."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - start) / BURST * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure(target: str, requests: int) -> dict[str, float]:
    """us by part, for a decode batch of `requests`."""
    device = resolve_device("auto")
    decoder = open_decoder(target, resolve_dtype("auto", device), device, shapes=True)
    config = RunnerConfig(
        max_num_requests=requests, max_model_len=512, num_blocks=1024, graphs="full_and_piecewise", capture_sizes=(requests,)
    )
    runner, _ = build_runner(decoder.module, config)
    forward = runner.forward
    assert isinstance(forward, GraphForward)
    shape = Shape(num_tokens=requests, num_requests=requests, uniform_query_len=1, max_query_len=1)
    dispatch = forward.dispatcher.dispatch(shape)
    assert dispatch.mode is GraphMode.FULL
    manager = forward.manager
    program = manager.program(dispatch.descriptor)
    with torch.no_grad():
        launch = burst_us(program.replay)
        chosen = burst_us(lambda: forward.dispatcher.dispatch(shape))
        whole = burst_us(lambda: manager.run(dispatch))
        guard, manager._guard = manager._guard, None
        without_sweep = burst_us(lambda: manager.run(dispatch))
        manager._guard = guard
    return {
        "launch": launch,
        "dispatch": chosen,
        "manager": without_sweep - launch,
        "critical path": chosen + without_sweep,
        "sweep behind the launch": whole - without_sweep,
        "nodes": float(program.nodes.total) if program.nodes is not None else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    parts = measure(arguments.target, arguments.requests)
    print(f"{arguments.target}, {arguments.requests} requests: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"target": arguments.target, "requests": arguments.requests, **parts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
