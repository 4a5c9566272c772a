"""From a plan and its blobs to a compiled function, on the road that cold and warm starts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rung import torch_compat
from rung.cache import Store
from rung.compile.artifact import Artifact, PieceLoader, Sources
from rung.compile.build import SplitGraph
from rung.compile.compiled import CompiledFunction
from rung.compile.plan import CompilePlan
from rung.compile.report import CompileReport
from rung.compile.selfcheck import check_piece
from rung.counters import Count, Counters
from rung.launch import Chooser, FirstConfig, MeasuredChoices


def load_plan(
    plan: CompilePlan,
    blobs: Mapping[str, bytes],
    owner: Mapping[str, Any],
    device: torch.device,
    store: Store,
    counters: Counters,
    report: CompileReport,
) -> CompiledFunction:
    """Load the pieces onto `device` and bind `owner`'s tensors. Blobs that were just made are in `blobs`, the others in the store. Raises
    `ArtifactError` for what is missing or damaged.

    The report gets what reading and hashing took, and, without that, the loading of machine code and the binding of tensors."""

    def read(digest: str) -> bytes:
        with report.clock("read and verify"):
            return blobs[digest] if digest in blobs else store.get_blob(digest)

    before = report.seconds.get("read and verify", 0.0)
    with report.clock("load pieces"):
        loader, chooser = PieceLoader(device, read), _chooser(device, store, counters)
        artifacts = [Artifact.from_bytes(read(digest)) for _, digest in plan.pieces]
        pieces = []
        for artifact in artifacts:
            call, refused = loader.bind(artifact, chooser)
            counters.add(Count.ARTIFACT_LOADS)
            counters.add(Count.PROGRAM_LOADS if refused is None else f"stock_load.{refused}")
            pieces.append(call)
    report.seconds["load pieces"] -= report.seconds.get("read and verify", 0.0) - before
    with report.clock("bind"):
        return CompiledFunction(plan, pieces, owner, Sources(artifacts, read))


def _chooser(device: torch.device, store: Store, counters: Counters) -> Chooser:
    if device.type != "cuda":
        return FirstConfig()
    return MeasuredChoices(store, torch.cuda.get_device_name(device), counters)


def check_pieces(graph: SplitGraph, plan: CompilePlan, blobs: Mapping[str, bytes], owner: Mapping[str, Any], device: torch.device) -> None:
    """Compare every unique piece, as it will be loaded, with its traced graph, and let the graph go. Raises `InternalError`."""
    loader = PieceLoader(device, blobs.__getitem__)
    for index, piece in enumerate(graph.pieces):
        step = next(step for step in plan.steps if step.piece == index)
        weights = [plan.inputs[n].resolve(owner) if n < len(plan.inputs) and plan.inputs[n].local in owner else None for n in step.inputs]
        if not any(map(torch_compat.is_fake, weights)):  # a build without the device can run nothing
            artifact = Artifact.from_bytes(blobs[plan.pieces[index][1]])
            check_piece(piece, blobs[artifact.stock], loader.bind(artifact, FirstConfig())[0], weights)
        piece.graph_module.graph = torch.fx.Graph()  # the fake tensors on its nodes keep the whole trace alive
    loader.unload()
