"""From a plan and its blobs to a compiled function, on the road that cold and warm starts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rung.cache import Store
from rung.compile.artifact import Artifact, PieceLoader, Read, Sources
from rung.compile.bound import StepCall
from rung.compile.compiled import CompiledFunction
from rung.compile.plan import CompilePlan
from rung.compile.report import CompileReport
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
        artifacts = [Artifact.from_bytes(read(digest)) for _, digest in plan.pieces]
        pieces = load_pieces(artifacts, read, device, store, counters)
    report.seconds["load pieces"] -= report.seconds.get("read and verify", 0.0) - before
    with report.clock("bind"):
        return CompiledFunction(plan, pieces, owner, Sources(artifacts, read))


def load_pieces(artifacts: Sequence[Artifact], read: Read, device: torch.device, store: Store, counters: Counters) -> list[StepCall]:
    """The functions of pieces on one device, which share machine code; each load and who made it is counted. Raises `ArtifactError`."""
    loader, chooser = PieceLoader(device, read), _chooser(device, store, counters)
    pieces = []
    for artifact in artifacts:
        call, refused = loader.bind(artifact, chooser)
        counters.add(Count.ARTIFACT_LOADS)
        counters.add(Count.PROGRAM_LOADS if refused is None else f"stock_load.{refused}")
        pieces.append(call)
    return pieces


def _chooser(device: torch.device, store: Store, counters: Counters) -> Chooser:
    if device.type != "cuda":
        return FirstConfig()
    return MeasuredChoices(store, torch.cuda.get_device_name(device), counters)
