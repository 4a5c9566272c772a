"""Which walk through a compiled model a runner's steps take: with rotations in the graphs, or beside the attention behind them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rung.attention import AttentionBackend
from rung.attention.base import JOINED, answers_for
from rung.compile.bound import BoundPlan
from rung.compile.compiled import CompiledFunction
from rung.graphs import Descriptor, GraphMode


def step_plan(
    compiled: CompiledFunction,
    backends: Iterable[AttentionBackend],
    descriptors: Iterable[Descriptor],
    dtype: torch.dtype,
    device: torch.device,
) -> BoundPlan:
    """The plan of piecewise graphs, and of steps without a graph beside them. Where decodes replay piecewise graphs, since no full ones are
    planned, and the backends of all layers rotate in the kernel that attends, a rotation is part of the break. Everywhere else it is part
    of the graph in front, where a launch costs the host nothing: beside full graphs of decodes, piecewise steps are prompts and mixed
    batches, which no kernel joins."""
    modes = {descriptor.mode for descriptor in descriptors}
    decodes = GraphMode.PIECEWISE in modes and GraphMode.FULL not in modes
    return compiled.joined if decodes and all(_joins(backend, dtype, device) for backend in backends) else compiled


def _joins(backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> bool:
    return answers_for(type(backend), "rotate_and_attend", JOINED) and backend.joins_rotation(dtype, device)
