"""The host's critical path of a full replay: dispatch, the manager's checks, the launch. Needs a GPU.

    python -m bench.replay --target llama-8b --requests 8 --out replay.json

Bursts of replays with the device idle before each; medians over bursts, us a replay. The sweep of addresses runs behind the launch and is a
row of its own. The batch is empty, so the device's work is that of padded rows.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from bench.bursts import burst_us
from rung.cli.assembly import open_decoder
from rung.cli.options import resolve_device, resolve_dtype
from rung.graphs import GraphMode, Shape
from rung.runner import RunnerConfig, build_runner
from rung.runner.graph_forward import GraphForward

BURST, ROUNDS = 8, 40
host_us = partial(burst_us, burst=BURST, rounds=ROUNDS)


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
        launch = host_us(program.replay)
        chosen = host_us(lambda: forward.dispatcher.dispatch(shape))
        whole = host_us(lambda: manager.run(dispatch))
        guard, manager._guard = manager._guard, None
        without_sweep = host_us(lambda: manager.run(dispatch))
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
