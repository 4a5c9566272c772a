"""Compare a piece's compiled entries with the traced graph once, on synthetic inputs, before they are trusted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rung import torch_compat
from rung.compile.artifact import PieceLoader, stock_call
from rung.compile.bound import StepCall
from rung.compile.build import SplitGraph
from rung.compile.fake_kernels import CheckedInterpreter
from rung.compile.piece_compiler import PieceCompiler, StoredPiece
from rung.compile.pieces import Piece
from rung.compile.plan import CompilePlan
from rung.compile.report import CompileReport
from rung.compile.split import mutates
from rung.counters import Count, Counters
from rung.errors import InternalError
from rung.launch import FirstConfig, Rehearsal, capability_of, launch_road, rehearse_launches
from rung.launch.alignment import aligned_copy

_log = logging.getLogger(__name__)
SIZES = (1, 3)  # of every dynamic dimension
_RELATIVE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
# Activations are rounded to e4m3 (2^-4 of a value) in some kernels for a product and not in others, and a piece has up to four in a row.
RELATIVE_ERROR_E4M3 = 0.1


def check_piece(piece: Piece, stock: bytes, entry: StepCall, weights: Sequence[Any], sizes: Sequence[int] = SIZES) -> None:
    """Raises `InternalError` when the loaded entry, Inductor's wrapper (of the serialised piece `stock`) and the traced graph differ at one
    of `sizes`.

    Size 1 is checked because the code was generated for sizes from 2: there a dimension of size 1 is addressed like any other, which is
    right because its only index is 0. A piece that talks to other ranks is not run. `weights` are the module's tensors among the inputs,
    None elsewhere."""
    if torch_compat.communicates(piece.graph_module):  # it would wait for ranks that may load what this one compiles
        return
    artifact = torch_compat.deserialize_artifact(stock)
    nodes = list(piece.graph_module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    outputs = next(node for node in reversed(nodes) if node.op == "output").args[0]
    in_place = any(mutates(node) for node in nodes)
    least_error = RELATIVE_ERROR_E4M3 if any(_is_fp8(node) for node in nodes) else 0.0
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        values = _values(placeholders, weights, size, generator)
        runs: dict[str, Callable[[], Sequence[Any]]] = {
            "graph": lambda: CheckedInterpreter(piece.graph_module).run(*_own(values, in_place)),  # noqa: B023 - called in this iteration
            "wrapper": lambda: artifact(*_own(values, in_place)),  # noqa: B023
            "loaded entry": lambda: entry(_own(values, in_place)),  # noqa: B023
        }
        with torch.no_grad():
            expected = _run_seeded(runs.pop("graph"), values)
            for name, run in runs.items():
                came = _run_seeded(run, values)
                for index, (node, want, got) in enumerate(zip(outputs, expected, came, strict=True)):
                    if not is_uninitialised(node) and not _agree(want, got, least_error):
                        raise InternalError(
                            f"output {index} of a piece differs between its {name} and the traced graph at size {size}",
                            hint="report it with the files that RUNG_DUMP=<folder> writes",
                        )


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
                check_piece(piece, found.blobs[artifact.stock], entry, weights, sizes)
            except Exception:
                compiler.forget(found)
                raise
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
                values = _values(placeholders, weights, size, generator)
                with torch_compat.fakes_of(values) as fakes:
                    run(fakes)
    return rehearsal


def _values(placeholders: Sequence[torch.fx.Node], weights: Sequence[Any], size: int, generator: torch.Generator) -> list[Any]:
    return [
        _sample(node.meta["example_value"], size, generator) if weight is None else weight
        for node, weight in zip(placeholders, weights, strict=True)
    ]


def _run_seeded(run: Callable[[], Sequence[Any]], values: Sequence[Any]) -> Sequence[Any]:
    """Random numbers are the same in every run, and the caller's generators stay where they are."""
    devices = {value.device.index for value in values if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)):
        torch.manual_seed(0)
        return run()


def _is_fp8(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn


def _agree(want: Any, got: Any, least_error: float) -> bool:
    """Equal up to rounding: fused code rounds fewer intermediates, and libraries sum in other orders."""
    if not isinstance(want, torch.Tensor):
        return bool(want == got)
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if not want.dtype.is_floating_point:
        return torch.equal(want, got)
    difference = (want.double().nan_to_num() - got.double().nan_to_num()).norm()
    allowed = max(least_error, _RELATIVE_ERROR.get(want.dtype, 1e-4))
    return bool(difference <= allowed * want.double().nan_to_num().norm())


def _own(values: Sequence[Any], in_place: bool) -> list[Any]:
    """Inputs that a run may write: copies of everything when the piece writes at all, of the buffers always (batch norm counts in them)."""
    return [_copy(value) if in_place or not isinstance(value, torch.nn.Parameter) else value for value in values]


def _copy(value: Any) -> Any:
    """A copy of the same layout: `clone` makes views of a wider buffer dense, and pieces are compiled for exact strides."""
    return aligned_copy(value) if isinstance(value, torch.Tensor) else value


def is_uninitialised(node: torch.fx.Node) -> bool:
    """Whether a value is memory that nobody has written yet: an attention output before its break."""
    name = str(getattr(node.target, "__name__", node.target))
    if name in ("empty", "empty_like", "new_empty", "empty_strided"):
        return True
    return name in ("view", "reshape", "flatten", "unsqueeze", "transpose") and is_uninitialised(node.all_input_nodes[0])


def _sample(value: Any, size: int, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch_compat.evaluate_size(value, size)
    shape = [torch_compat.evaluate_size(extent, size) for extent in value.shape]
    stride = [torch_compat.evaluate_size(extent, size) for extent in value.stride()]
    result = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        return result.copy_(torch.randn(shape, generator=generator) * 0.5)
    return result.zero_()  # integers are mostly indices; 0 is valid for all of them
