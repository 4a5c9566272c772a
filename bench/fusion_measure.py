"""Steps of several compiles of one model, measured in turns: kernels by name, us, hidden states. For `bench.fusions`; needs a GPU.

What the device's clock does in the meantime (a product of 1024 rows of the 8B shape takes its whole power) meets all of them alike.
"""

from __future__ import annotations

import re
import statistics
import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.fusion_models import bind, positions_of
from rung.compile.compiled import CompiledFunction
from rung.context import set_forward_context

SETS, ROUNDS, REPLAYS, PROFILED = 3, 4, 4, 2
_MARK = "spin_kernel"  # of torch.cuda._sleep
Key = Hashable


@dataclass(slots=True)
class Found:
    """One compile at one number of rows; a step is all of the model."""

    us: float = 0.0  # a step, the median of the turns
    spread: float = 0.0  # of the turns, over the median
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)  # by short name: launches and us a step
    hidden: torch.Tensor | None = None  # float32, of the first inputs

    @property
    def launches(self) -> float:
        return sum(count for count, _ in self.kernels.values())


def measure(model: nn.Module, compiled: Mapping[Key, CompiledFunction], vocab_size: int, rows: int) -> dict[Key, Found]:
    """All of them at this number of rows, captured, then replayed in turns."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(1)
    torch.manual_seed(2)  # of the keys and values in the cache
    ids, positions = torch.empty(rows, dtype=torch.int32, device=device), positions_of(rows, device)
    draws = [torch.randint(0, vocab_size, (rows,), generator=generator, device=device, dtype=torch.int32) for _ in range(SETS)]
    ids.copy_(draws[0])
    context = bind(model, rows, device)  # kept to the end: the graphs read its tensors
    graphs: dict[Key, torch.cuda.CUDAGraph] = {}
    found: dict[Key, Found] = {}
    for key, call in compiled.items():
        with torch.no_grad(), set_forward_context(context):
            for _ in range(2):
                call(ids, positions)
            torch.cuda.synchronize()
            graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[key]):
                out = call(ids, positions)
        graphs[key].replay()
        found[key] = Found(hidden=out.float())
    for key, kernels in _kernels(graphs).items():
        found[key].kernels = kernels
    times: dict[Key, list[float]] = {key: [] for key in graphs}
    for turn in range(ROUNDS):
        for draw in draws:
            ids.copy_(draw)
            for key in sorted(graphs, key=list(graphs).index, reverse=turn % 2 == 1):
                times[key].append(_replayed(graphs[key]))
    for key, taken in times.items():
        found[key].us = statistics.median(taken)
        found[key].spread = (max(taken) - min(taken)) / found[key].us
    return found


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    """us a replay, behind one that is not counted."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPLAYS


def _kernels(graphs: Mapping[Key, torch.cuda.CUDAGraph]) -> dict[Key, dict[str, tuple[float, float]]]:
    """What each graph launches, from one profile of all: a kernel of another kind stands between two."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for graph in graphs.values():
            torch.cuda._sleep(1000)
            for _ in range(PROFILED):
                graph.replay()
            torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    parts = parted((event.name, event.time_range.elapsed_us()) for event in events)
    if len(parts) != len(graphs):
        warnings.warn(f"{len(parts)} marks were recorded between {len(graphs)} graphs: no kernels by name", stacklevel=2)
        return {}
    return {key: by_name(part, PROFILED) for key, part in zip(graphs, parts, strict=True)}


def parted(kernels: Iterable[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """What stands behind each mark, without the mark."""
    parts: list[list[tuple[str, float]]] = []
    for name, us in kernels:
        if _MARK in name:
            parts.append([])
        elif parts:
            parts[-1].append((name, us))
    return parts


def by_name(kernels: Iterable[tuple[str, float]], replays: int) -> dict[str, tuple[float, float]]:
    """Launches and us a replay by short name, those that take longest first."""
    total: dict[str, tuple[float, float]] = {}
    for name, us in kernels:
        count, so_far = total.get(short(name), (0.0, 0.0))
        total[short(name)] = count + 1 / replays, so_far + us / replays
    return dict(sorted(total.items(), key=lambda item: -item[1][1]))


def short(name: str) -> str:
    """A kernel's name without its namespaces, types and arguments."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2].strip()[:48] or name[:48]
