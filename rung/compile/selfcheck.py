"""Compare a piece's compiled entries with the traced graph once, on synthetic inputs, before they are trusted."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch

from rung import torch_compat
from rung.compile.artifact import PieceLoader, stock_call
from rung.compile.bound import StepCall
from rung.compile.build import SplitGraph
from rung.compile.piece_compiler import PieceCompiler, StoredPiece
from rung.compile.pieces import Piece
from rung.compile.plan import CompilePlan
from rung.compile.report import CompileReport
from rung.compile.rounding import SHAKEN_RUNS, ShakenRun, agree, explained, float_dtypes, tolerance_of
from rung.compile.split import mutates
from rung.compile.synthetic import INTEGERS, GraphRun, own, values_of
from rung.counters import Count, Counters
from rung.errors import InternalError, RungError
from rung.launch import FirstConfig, Rehearsal, capability_of, launch_road, rehearse_launches

_log = logging.getLogger(__name__)
SIZES = (1, 3)  # of every dynamic dimension


class Uncompared(StrEnum):
    """Why a piece is trusted without a comparison at all sizes; each is counted as `uncompared_piece.<reason>`."""

    RANKS = "ranks"  # it would wait for ranks that may load what this one compiles
    VALUES = "values"  # the traced graph itself raises on made-up values: an index may start at 1, a sum may need two rows
    MEMORY = "memory"  # the device has no room for a second run


def check_piece(piece: Piece, stock: bytes, entry: StepCall, weights: Sequence[Any], sizes: Sequence[int] = SIZES) -> Uncompared | None:
    """Raises `InternalError` when the loaded entry, Inductor's wrapper (of the serialised piece `stock`) and the traced graph differ at one
    of `sizes`; tells why one of them was left out.

    Size 1 is checked because the code was generated for sizes from 2: there a dimension of size 1 is addressed like any other, which is
    right because its only index is 0. `weights` are the module's tensors among the inputs, None elsewhere."""
    if torch_compat.communicates(piece.graph_module):
        return Uncompared.RANKS
    artifact = torch_compat.deserialize_artifact(stock)
    runs: dict[str, StepCall] = {"wrapper": lambda given: artifact(*given), "loaded entry": entry}
    generator = torch.Generator().manual_seed(0)
    reason: Uncompared | None = None
    for size in sizes:
        with torch.no_grad():
            graph = _TracedRun.at(piece, weights, size, generator)
            if isinstance(graph, Uncompared):
                reason = graph
                continue
            for name, run in runs.items():
                index = graph.first_difference(graph.run(run))
                if index is not None:
                    raise InternalError(
                        f"output {index} of a piece differs between its {name} and the traced graph at size {size}",
                        hint="report it with the files that RUNG_DUMP=<folder> writes",
                    )
    return reason


class _TracedRun:
    """What the traced graph makes of one set of values. Raises what it raises on them."""

    def __init__(self, piece: Piece, values: Sequence[Any]) -> None:
        self._module, self._values = piece.graph_module, values
        self._nodes = list(piece.graph_module.graph.nodes)
        self._in_place = any(mutates(node) for node in self._nodes)
        self._tolerance = tolerance_of(piece.graph_module.graph)
        self._expected = self.run(lambda given: GraphRun(self._module).run(*given))

    @classmethod
    def at(cls, piece: Piece, weights: Sequence[Any], size: int, generator: torch.Generator) -> _TracedRun | Uncompared:
        """A run on the first values that the graph can take."""
        placeholders = piece.graph_module.graph.find_nodes(op="placeholder")
        why = ""
        for integer in INTEGERS:
            try:
                return cls(piece, values_of(placeholders, weights, size, generator, integer))
            except RungError:  # an op that does not return what its fake kernel says
                raise
            except torch.OutOfMemoryError:
                return Uncompared.MEMORY
            except Exception as error:  # whatever an operation may raise
                why = f"{type(error).__name__}: {error}"
        _log.warning("a piece is not compared at size %d, as its graph cannot take made-up values: %s", size, why)
        return Uncompared.VALUES

    def run(self, call: StepCall) -> Sequence[Any]:
        """What `call` returns for the same values. Random numbers are the same in every run, and the caller's generators stay where they
        are."""
        devices = {value.device.index for value in self._values if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
        with torch.random.fork_rng(sorted(devices)):
            torch.manual_seed(0)
            return call(own(self._values, self._in_place))

    def first_difference(self, came: Sequence[Any]) -> int | None:
        """The first output that differs by more than rounding."""
        outputs = self._nodes[-1].args[0]
        for index, (node, want, got) in enumerate(zip(outputs, self._expected, came, strict=True)):
            if is_uninitialised(node) or agree(want, got, self._tolerance):
                continue
            if not explained(want, got, [run[index] for run in self._shaken]):
                return index
        return None

    @functools.cached_property
    def _shaken(self) -> list[Sequence[Any]]:
        """Made when something differs, and not before: on a device each is a run of the whole piece."""
        if not float_dtypes(self._module.graph):
            return []
        try:
            return [self.run(lambda given, seed=seed: ShakenRun(self._module, seed).run(*given)) for seed in range(SHAKEN_RUNS)]  # type: ignore[misc]
        except Exception as error:  # values that were moved may be none for an operation; the difference stands
            _log.warning("a piece cannot tell how far its rounding goes: %s: %s", type(error).__name__, error)
            return []


Case = tuple[Piece, StoredPiece, Sequence[Any]]  # a piece, what it was compiled to, the module's tensors among its inputs


def cases_of(graph: SplitGraph, plan: CompilePlan, stored: Sequence[StoredPiece], owner: Mapping[str, Any]) -> list[Case]:
    """The unique pieces of `graph` that can run here, with what they were compiled to: a build without the device can run nothing."""
    cases: list[Case] = []
    for index, (piece, found) in enumerate(zip(graph.pieces, stored, strict=True)):
        step = next(step for step in plan.steps if step.piece == index)
        weights = [plan.inputs[n].resolve(owner) if n < len(plan.inputs) and plan.inputs[n].local in owner else None for n in step.inputs]
        if not any(map(torch_compat.is_fake, weights)):
            cases.append((piece, found, weights))
    return cases


def check_pieces(
    cases: Sequence[Case],
    report: CompileReport,
    counters: Counters,
    device: torch.device,
    compiler: PieceCompiler,
    sizes: Sequence[int] = SIZES,
) -> None:
    """`check_piece` of all; `compiler` takes one that fails out of the store. On a device our own kernels are built at once before, and not
    one after another at their first launch."""
    if device.type == "cuda" and launch_road() == "prebound" and not report.kernels_built:
        with report.clock("build kernels"):
            _build_kernels(cases, device, counters, sizes)
    loader = PieceLoader(device, {digest: data for _, found, _ in cases for digest, data in found.blobs.items()}.__getitem__)
    with report.clock("compare once"):
        for piece, found, weights in cases:
            artifact = found.artifact
            entry, _ = loader.bind(artifact, FirstConfig())
            try:
                reason = check_piece(piece, found.blobs[artifact.stock], entry, weights, sizes)
            except Exception:
                compiler.forget(found)
                raise
            if reason is not None:
                counters.add(f"uncompared_piece.{reason}")
    loader.unload()


def _build_kernels(cases: Sequence[Case], device: torch.device, counters: Counters, sizes: Sequence[int]) -> None:
    try:
        rehearsal = find_kernels(cases, capability_of(device), sizes)
    except Exception as error:  # a piece that does more than tensor operations
        counters.add(Count.UNFORESEEN_KERNELS)
        _log.warning("kernels are built one by one: %s: %s", type(error).__name__, error)
        return
    rehearsal.build(os.cpu_count() or 1, torch_compat.compile_workers())


def find_kernels(cases: Iterable[Case], capability: int, sizes: Sequence[int] = SIZES) -> Rehearsal:
    """The images of our own kernels that `check_piece` will ask for, from runs on tensors without memory: on the device, what lies behind a
    kernel that is only noted would read garbage, perhaps as indices. Raises `CompileError` for pieces that cannot run so."""
    generator = torch.Generator().manual_seed(0)
    with torch_compat.quiet_compiler(), torch.no_grad(), rehearse_launches(capability) as rehearsal:
        for piece, found, weights in cases:
            run = torch_compat.memoryless(stock_call(found.blobs[found.artifact.stock]))
            placeholders = piece.graph_module.graph.find_nodes(op="placeholder")
            for size in sizes:
                values = values_of(placeholders, weights, size, generator)
                with torch_compat.fakes_of(values) as fakes:
                    run(fakes)
    return rehearsal


def is_uninitialised(node: torch.fx.Node) -> bool:
    """Whether a value is memory that nobody has written yet: an attention output before its break."""
    name = str(getattr(node.target, "__name__", node.target))
    if name in ("empty", "empty_like", "new_empty", "empty_strided"):
        return True
    return name in ("view", "reshape", "flatten", "unsqueeze", "transpose") and is_uninitialised(node.all_input_nodes[0])
