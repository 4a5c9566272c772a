"""What CUDA graphs take: bytes a node and a graph, and a decoder's whole ladder by phase, kind and prediction.

    python -m bench.memory [--target llama-8b] [--target smollm2-135m] [--requests 256] [--out FOLDER]

First each target, random weights: all sizes for `--requests` slots (256: 51 piecewise, 35 full), seconds by phase, bytes by kind, nodes,
the prediction from three sizes of each mode, and what the device itself says. Then graphs of 1 to 1000 equal kernels by themselves: device
memory outside of the caching allocator after the graph was instantiated, uploaded and replayed. Drivers hand it out in pieces, so many
graphs are made and divided by. `--out` also gets a profile of the host's work in a capture.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rung.cli.doctor import devices, version_of
from rung.graphs import Dispatch, GraphMode
from rung.graphs.backends.driver import count_captured_nodes, upload_graph
from rung.graphs.capture import warm_up
from rung.models import random_model
from rung.runner import ModelRunner, RunnerConfig, StartUp, build_runner
from rung.runner.graph_forward import GraphForward

MIB = 2**20
NODES = (1, 10, 100, 1000)


def outside() -> int:
    """Device memory in use outside of the caching allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def in_use() -> int:
    """Device memory in use, without what the allocator keeps for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


# --- nodes by themselves -------------------------------------------------------------------------------------------------------------


def kernels() -> dict[str, Callable[[], object]]:
    """One kernel a call. The many arguments are the addresses of 30 tensors in a struct of some 4 kB."""
    one = torch.zeros(1, device="cuda")
    many = [torch.zeros(1, device="cuda") for _ in range(30)]
    a, out = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16), torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    return {
        "small": lambda: one.add_(1),
        "many arguments": lambda: torch._foreach_add_(many, 1.0),
        "matmul": lambda: torch.mm(a, a, out=out),
    }


def measure_nodes(name: str, call: Callable[[], object], nodes: int) -> dict[str, Any]:
    count = 256 if nodes <= 10 else 64 if nodes <= 100 else 16
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    steps: list[int] = []
    seconds = dict.fromkeys(("capture", "instantiate", "upload", "count"), 0.0)
    graphs, counted = [], None
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        before = last = outside()
        for _ in range(count):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with timed(seconds, "capture"):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                for _ in range(nodes):
                    call()
            with timed(seconds, "count"):
                counted = count_captured_nodes(stream.cuda_stream)
            graph.capture_end()
            with timed(seconds, "instantiate"):
                graph.instantiate()
            graphs.append(graph)
            now = outside()
            steps.append(now - last)
            last = now
        instantiated = last - before
        with timed(seconds, "upload"):
            for graph in graphs:
                upload_graph(graph.raw_cuda_graph_exec(), stream.cuda_stream)
        uploaded = outside() - before
        for graph in graphs:
            graph.replay()
        replayed = outside() - before
        for graph in graphs:
            graph.reset()
        graphs.clear()
    left = outside() - before
    return {
        "kernel": name,
        "nodes": nodes,
        "counted": None if counted is None else counted.total,
        "graphs": count,
        "instantiated_bytes": instantiated / count,
        "uploaded_bytes": uploaded / count,
        "replayed_bytes": replayed / count,
        "left_bytes": left,
        "smallest_step_bytes": min((step for step in steps if step), default=0),
        **{f"{phase}_us": 1e6 * value / count for phase, value in seconds.items()},
    }


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


# --- a decoder -----------------------------------------------------------------------------------------------------------------------


def build(target: str, **values: Any) -> tuple[ModelRunner, GraphForward, StartUp]:
    module = random_model(target, dtype=torch.bfloat16, device="cuda")
    sizes = {"max_num_tokens": 2048, "max_model_len": 1024, "graphs": "full_and_piecewise"}
    runner, start = build_runner(module, RunnerConfig(**{**sizes, **values}))  # type: ignore[arg-type]
    assert isinstance(runner.forward, GraphForward)
    return runner, runner.forward, start


def measure_ladder(target: str, requests: int, profile: Path | None) -> dict[str, Any]:
    runner, forward, start = build(target, max_num_requests=requests, num_blocks=1024, lazy_capture=True)
    manager, descriptors = forward.manager, forward.descriptors
    for descriptor in descriptors:  # kernels are loaded and workspaces exist from here on, and no graph took memory yet
        with runner.dummy_context(Dispatch(descriptor)):
            warm_up(forward.plan_of(descriptor), runner.device, descriptor, manager.views(descriptor), watch=False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    gc.collect()
    before, before_outside = in_use(), outside()
    forward.manager.forget_model()
    report = forward.capture(runner.dummy_context)
    after_capture, after_outside = in_use(), outside()
    for descriptor in descriptors:
        if descriptor.mode is GraphMode.FULL:  # the piecewise ones ran in the capture, and need a step's context
            manager.run(descriptor)
    after_replay = in_use()
    memory = manager.memory()
    by_mode = {mode: [one for one in report.entries if one.descriptor.mode is mode] for mode in (GraphMode.PIECEWISE, GraphMode.FULL)}
    result = {
        "target": target,
        "captures": {str(mode): len(entries) for mode, entries in by_mode.items()},
        "seconds": report.seconds,
        "phases": {str(mode): _phases(entries) for mode, entries in by_mode.items()},
        "nodes": {str(mode): entries[0].num_nodes for mode, entries in by_mode.items() if entries},
        "device_bytes": after_capture - before,
        "device_bytes_after_replays": after_replay - before,
        "device_executable_bytes": after_outside - before_outside,
        "start_up_seconds": start.seconds,
        **memory.as_json(),
        "summary": str(memory),
    }
    manager.release()
    manager.backend.reclaim()
    gc.collect()
    result["left_bytes"] = in_use() - before
    if profile is not None:
        (profile / f"capture-{target}.txt").write_text(_profiled(lambda: forward.capture(runner.dummy_context)))
    return result


def _phases(entries: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for entry in entries:
        for name, seconds in entry.phases.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _profiled(call: Callable[[], object]) -> str:
    profiler = cProfile.Profile()
    profiler.runcall(call)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumulative").print_stats(45)
    return text.getvalue()


def measure_plan(target: str) -> dict[str, Any]:
    """The KV cache of a runner that wants more than there is."""
    runner, _, start = build(target, max_num_requests=512, max_model_len=8192)
    plan = start.memory
    found = {
        "target": target,
        "seconds": start.seconds,
        "num_blocks": runner.num_blocks,
        "plan": plan and plan.as_json(),
        "text": str(plan),
    }
    if start.capture is not None and start.capture.memory is not None:
        found["graphs"] = str(start.capture.memory)
    free, total = torch.cuda.mem_get_info()
    return {**found, "in_use_share": 1 - free / total}


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def show(nodes: list[dict[str, Any]], ladders: list[dict[str, Any]], plans: list[dict[str, Any]]) -> None:
    print("bytes of an executable graph, outside of the caching allocator")
    for row in nodes:
        took = ", ".join(f"{name} {row[f'{name}_bytes'] / 1024:.1f} KiB" for name in ("instantiated", "uploaded", "replayed"))
        times = ", ".join(f"{name} {row[f'{name}_us']:.0f}" for name in ("capture", "count", "instantiate", "upload"))
        print(
            f"{row['kernel']:15} {row['nodes']:5} nodes ({row['counted']} counted): {took}; us {times}; left {row['left_bytes'] >> 10} KiB"
        )
    for row in ladders:
        print(f"{row['target']}: {row['captures']} in {row['seconds']:.2f} s; nodes {row['nodes']}")
        for mode, phases in row["phases"].items():
            print(f"  {mode:10}" + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items()))
        print(f"  {row['summary']}")
        device = f"device {row['device_bytes'] / MIB:.1f} MiB, after replays {row['device_bytes_after_replays'] / MIB:.1f}"
        print(f"  {device}, executables {row['device_executable_bytes'] / MIB:.1f}; left after release {row['left_bytes'] / MIB:.1f}")
        model = row["model"]
        print(f"  {model['bytes_per_graph']:.0f} bytes a graph, {model['bytes_per_node']:.0f} a node")
    for row in plans:
        print(f"{row['target']}: {row['text']}; {row['num_blocks']} blocks; {row.get('graphs')}; in use {row['in_use_share']:.1%}")
        print("  " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row["seconds"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="default: llama-8b; one a process, drivers keep what graphs took")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    targets = arguments.target or ["llama-8b"]
    ladders, plans = [], []
    with torch.no_grad():
        for target in targets:
            clean()
            ladders.append(measure_ladder(target, arguments.requests, arguments.out))
            clean()
            plans.append(measure_plan(target))
        clean()
        nodes = [measure_nodes(name, call, count) for name, call in kernels().items() for count in NODES]
    if arguments.out is not None:
        setting = {"device": devices()[1], "versions": {name: version_of(name) for name in ("rung", "torch", "triton")}}
        (arguments.out / "memory.json").write_text(json.dumps({**setting, "nodes": nodes, "ladders": ladders, "plans": plans}, indent=2))
    show(nodes, ladders, plans)


if __name__ == "__main__":
    main()
