"""Compile a function, or load it: cold and warm are one road.

A cold start compares the compiler's own callables once with the loaded ones, throws them away, writes plan and blobs, and loads them
exactly as a warm start does.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from rung import torch_compat
from rung.attention import SPLIT_OPS
from rung.cache import Factors, Store, key_of
from rung.compile.auto_break import trace_with_breaks
from rung.compile.bound import gpu_or_first
from rung.compile.build import SplitGraph, build_steps, split_traced
from rung.compile.compiled import CompiledFunction
from rung.compile.dump import Dump
from rung.compile.early_kernels import EarlyKernels
from rung.compile.garbage import without_collections
from rung.compile.guards import Roots
from rung.compile.load import load_plan
from rung.compile.named_ops import check_ops_exist, unused_lines, unused_ops
from rung.compile.paths import Path
from rung.compile.piece_compiler import MISS_HINT, PieceCompiler, StoredPiece
from rung.compile.plan import CompilePlan, TensorSpec
from rung.compile.plan_key import entry_name, plan_factors
from rung.compile.progress import piece_progress
from rung.compile.report import CompileReport
from rung.compile.rows import Verdicts, output_dims, prove_rows
from rung.compile.selfcheck import SIZES, cases_of, check_pieces
from rung.compile.signature import self_name
from rung.compile.size_variants import SizeVariants, Source
from rung.compile.sizes import SizeRange
from rung.compile.sources import type_refs
from rung.compile.stored_plans import StoredPlans
from rung.compile.trace import DynamicDims, TracedGraph, trace
from rung.compile.whole import WholeReport, layers_of
from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import ArtifactError, CacheMissError, InternalError
from rung.passes.expectations import check_expectations

_log = logging.getLogger(__name__)  # TORCH_LOGS="rung" shows it


class Driver:
    """Compiles functions with one configuration into one store."""

    def __init__(self, config: CompileConfig, store: Store, counters: Counters) -> None:
        self.config = config
        self.store = store
        self.counters = counters
        self.pieces = PieceCompiler(config, store, counters)
        self.plans = StoredPlans(store)

    @without_collections()
    def compile(
        self, function: Callable[..., Any], locals_: Mapping[str, Any], tensors: Sequence[tuple[Path, torch.Tensor]], dims: DynamicDims
    ) -> tuple[CompiledFunction, CompileReport]:
        """Trace and compile `function` for the bound arguments `locals_` (self excluded), or load it from the store.

        `tensors` are the tensor arguments, `dims` the dynamic dimensions as argument -> {dim: name}."""
        check_ops_exist(self.config)
        report = CompileReport(title=entry_name(function).rpartition(":")[2])
        owner = _owner(function)
        device = _device([tensor for _, tensor in tensors], getattr(function, "__self__", None))
        with report.clock("keys"):
            code = self.pieces.factors(device)
            factors, opaque = plan_factors(function, locals_, tensors, dims, self.config, code)
            report.plan_key = key_of(factors.values())
        report.dump = Dump.of(entry_name(function), report.plan_key)
        roots = Roots(function)
        blobs: dict[str, bytes] = {}
        made: Source | None = None
        with report.clock("read plan"):
            plan = None if opaque else self._find_plan(report, tensors, factors, roots)
        if plan is None:
            with self.store.lock("plans", report.plan_key) as again:
                plan = self._find_plan(report, tensors, factors, roots) if again and not opaque else None
                if opaque:
                    report.reason = f"not cacheable: attribute {opaque[0]!r} cannot be described"
                if plan is None:
                    plan, blobs, made = self._build(function, locals_, tensors, dims, report, factors, keep=not opaque)
        if report.source != "compiled":
            self.counters.add(Count.PLAN_HITS)
            self.store.log("hit", "plans", report.plan_key)
            report.source = "loaded"
        try:
            compiled = self._load(plan, blobs, owner, report, device)
        except ArtifactError as error:
            if report.source == "compiled":
                raise
            warnings.warn(f"a stored artifact could not be used and is built again: {error.message}", RuntimeWarning, stacklevel=2)
            report.reason = error.message
            plan, blobs, made = self._build(function, locals_, tensors, dims, report, factors, keep=True)
            compiled = self._load(plan, blobs, owner, report, device)
        if self.config.variants:
            ranges = [SizeRange.of(given) for given in self.config.variants]
            retraced = functools.partial(self._trace_again, function, locals_, dims, plan, report)
            report.variants = SizeVariants(compiled, ranges, self.pieces, code, owner, self.counters)
            report.variants.start(lambda: made or retraced(), background=self.config.background_variants)
        elif made is not None:
            made[0].forget()
        report.pieces = sum(step.piece is not None for step in plan.steps)
        report.unique_pieces = len(plan.pieces)
        report.whole_passes = dict(plan.whole.passes)
        report.dump.loaded(plan, compiled)
        _log.info(
            "%s %s: %d pieces, %d unique, %d guards", plan.entry, report, report.pieces, report.unique_pieces, len(plan.guards.guards)
        )
        for region in plan.regions:
            _log.info("%s: %s runs eagerly%s: %s", plan.entry, region.label, region.where, region.reason)
        for line in unused_lines(plan.unused_ops):
            _log.info("%s: %s", plan.entry, line)
        _log.debug("%s: steps %s", plan.entry, [step.name for step in plan.steps])
        return compiled, report

    # --- warm ------------------------------------------------------------------------------------------------------------------------

    def _find_plan(
        self, report: CompileReport, tensors: Sequence[tuple[Path, torch.Tensor]], factors: Factors, roots: Roots
    ) -> CompilePlan | None:
        layers = layers_of(roots)

        def violation(plan: CompilePlan) -> str:
            return plan.guards.violation(roots, self.config.drop_guards) or plan.whole.violation(layers)

        found = self.plans.find(report.plan_key, factors, tensors, violation)
        report.reason, report.saved_seconds, report.passes = found.reason, found.seconds, found.passes
        return found.plan

    # --- cold ------------------------------------------------------------------------------------------------------------------------

    def _build(
        self,
        function: Callable[..., Any],
        locals_: Mapping[str, Any],
        tensors: Sequence[tuple[Path, torch.Tensor]],
        dims: DynamicDims,
        report: CompileReport,
        factors: Factors,
        *,
        keep: bool,
    ) -> tuple[CompilePlan, dict[str, bytes], Source]:
        entry = entry_name(function)
        self.counters.add(Count.PLAN_MISSES)
        self.store.log("miss", "plans", report.plan_key, f"{entry}: {report.reason}")
        if self.store.require_hit:
            raise CacheMissError(f"{entry} would have to be compiled: {report.reason}", hint=MISS_HINT)
        report.source = "compiled"
        report.passes.clear()
        dump = report.dump
        device = _device([tensor for _, tensor in tensors], getattr(function, "__self__", None))
        if device.type == "cuda":  # before the other imports and the trace: kernels wait for the workers
            with report.clock("import Inductor"), torch_compat.quiet_compiler():
                torch_compat.start_workers()
        traced = self._trace(function, locals_, dims, report)
        dump.traced(traced)
        met: set[str] = set()
        rows = self._prove(traced, report, met)
        dims_out = output_dims(traced.graph_module, traced.symbols)
        with report.clock("split"):
            graph, whole = split_traced(traced, function, self.config)
        stored = self._compile_pieces(graph, traced, device, report, dump, whole)
        blobs = _blobs(stored)
        bound = min((piece.bound for piece in stored if piece.bound is not None), default=None)
        plan = CompilePlan(
            entry=entry,
            inputs=traced.inputs,
            tensors=tuple((path, self._spec(path, tensor, dims, traced)) for path, tensor in tensors),
            bounds={name: bound if given is None else given for name, given in traced.bounds.items()},
            pieces=_pieces(graph, stored),
            steps=graph.steps,
            outputs=graph.outputs,
            template=traced.template,
            sources=(*traced.sources, *type_refs(traced.template)),
            written=graph.written,
            aliased=graph.aliased,
            guards=traced.guards,
            rows=rows,
            fakes=graph.fakes,
            regions=tuple(traced.regions.values()),
            whole=whole,
            output_dims=dims_out,
            unused_ops=unused_ops(self.config, graph.steps, met if rows else None),
        )
        check_pieces(cases_of(graph, plan, stored, _owner(function)), report, self.counters, device, self.pieces)
        if traced.guards.unknown:
            report.reason = f"not cacheable: the trace depends on {traced.guards.unknown[0]}, which cannot be checked in another process"
        elif keep and all(piece.saved for piece in stored):
            with report.clock("save"):
                seconds = {**report.seconds, "compile": report.piece_seconds}
                self.pieces.save(lambda: self.plans.keep(report.plan_key, factors, plan, seconds, report.passes, blobs))
        return plan, blobs, (graph, traced)

    def _trace_again(
        self, function: Callable[..., Any], locals_: Mapping[str, Any], dims: DynamicDims, plan: CompilePlan, report: CompileReport
    ) -> Source:
        """The split graph of a plan that came from the store."""
        traced = self._trace(function, locals_, dims, report)
        graph, _ = split_traced(traced, function, self.config)
        if [piece.key for piece in graph.pieces] != [key for key, _ in plan.pieces]:
            raise InternalError(f"{plan.entry} was traced to other pieces than its plan has", hint="report it; leave out `variants`")
        return graph, traced

    def _trace(self, function: Callable[..., Any], locals_: Mapping[str, Any], dims: DynamicDims, report: CompileReport) -> TracedGraph:
        with report.clock("import Dynamo"), torch_compat.quiet_compiler():
            torch_compat.import_tracer()
        with report.clock("import Inductor"), torch_compat.quiet_compiler():
            torch_compat.import_inductor()
        torch_compat.hash_compilers()
        with report.clock("trace"), torch_compat.quiet_compiler():
            traced = (trace_with_breaks if self.config.breaks == "auto" else trace)(function, locals_, dims, maximum=self.config.maximum)
            self.counters.add(Count.DYNAMO_TRACES)
        return traced

    def _prove(self, traced: TracedGraph, report: CompileReport, met: set[str]) -> Verdicts:
        """Whether the rows of the dimensions to be padded are independent; `met` takes the ops that were looked at."""
        names = [traced.unified.get(name, name) for name in self.config.pad]
        if not names:
            return {}
        with report.clock("rows"):
            return prove_rows(traced.graph_module, traced.symbols, traced.bounds, names, self.config.row_wise_ops, traced.regions, met)

    def compile_traced(self, traced: TracedGraph) -> CompiledFunction:
        """Compile a graph whose guards somebody else keeps; pieces come from and go to the store, the plan does not."""
        report = CompileReport(title="a graph", source="compiled", reason="traced by torch.compile")
        dump = Dump.of("torch_compile:graph", key_of({"id": id(traced)}))
        dump.traced(traced)
        placeholders = [node for node in traced.graph_module.graph.nodes if node.op == "placeholder"]
        values = [node.meta["example_value"] for node in placeholders]
        device = _device([value for value in values if isinstance(value, torch.Tensor)], None)
        graph = build_steps(traced, SPLIT_OPS | set(self.config.split_ops))
        stored = self._compile_pieces(graph, traced, device, report, dump)
        pieces = _pieces(graph, stored)
        plan = CompilePlan("", traced.inputs, (), {}, pieces, graph.steps, graph.outputs, traced.template, (), aliased=graph.aliased)
        check_pieces(cases_of(graph, plan, stored, {}), report, self.counters, device, self.pieces)
        graph.forget()
        return self._load(plan, _blobs(stored), {}, report, device)

    def _compile_pieces(
        self,
        graph: SplitGraph,
        traced: TracedGraph,
        device: torch.device,
        report: CompileReport,
        dump: Dump,
        whole: WholeReport | None = None,
    ) -> list[StoredPiece]:
        """The unique pieces, from the store or from Inductor."""
        self.counters.add(Count.PIECES, sum(step.piece is not None for step in graph.steps))
        self.counters.add(Count.UNIQUE_PIECES, len(graph.pieces))
        code = self.pieces.factors(device)
        early = EarlyKernels.of(device, SIZES, self.counters)
        order: Sequence[int] = range(len(graph.pieces))
        if early is not None:  # what has most kernels first: they are built while the others are compiled
            order = sorted(order, key=lambda index: -len(graph.pieces[index].graph_module.graph.nodes))
        stored: dict[int, StoredPiece] = {}
        with report.clock("compile"), piece_progress(report.title, len(graph.pieces), wanted=self.config.progress) as advance:
            for index in order:
                stored[index] = self.pieces.blob(index, graph.pieces[index], traced, code, report, dump, early=early)
                advance()
        compiled = [stored[index] for index in range(len(graph.pieces))]
        report.passes = [passes for _, passes in sorted(zip(order, report.passes, strict=True), key=itemgetter(0))]
        uses = [sum(step.piece == index for step in graph.steps) for index in range(len(graph.pieces))]
        reports = [*zip(report.passes, uses, strict=True), *([] if whole is None else [(whole.passes, 1)])]
        check_expectations(self.config.expect, reports)
        if early is not None:
            with report.clock("build kernels"):
                report.kernels_built = early.finish(len(graph.pieces))
        return compiled

    def _spec(self, path: Path, tensor: torch.Tensor, dims: DynamicDims, traced: TracedGraph) -> TensorSpec:
        named = {dim: traced.unified.get(name, name) for dim, name in dims.get(path.dotted(), {}).items()}
        shape = tuple(named[dim] if named.get(dim) in traced.bounds else extent for dim, extent in enumerate(tensor.shape))
        return TensorSpec(str(tensor.dtype), tensor.device.type, shape)

    def _load(
        self, plan: CompilePlan, blobs: Mapping[str, bytes], owner: Mapping[str, Any], report: CompileReport, device: torch.device
    ) -> CompiledFunction:
        with torch_compat.quiet_compiler():
            return load_plan(plan, blobs, owner, device, self.store, self.counters, report)


def _pieces(graph: SplitGraph, stored: Sequence[StoredPiece]) -> tuple[tuple[str, str], ...]:
    return tuple((piece.key, found.digest) for piece, found in zip(graph.pieces, stored, strict=True))


def _blobs(stored: Sequence[StoredPiece]) -> dict[str, bytes]:
    return {digest: data for piece in stored for digest, data in piece.blobs.items()}


def _owner(function: Callable[..., Any]) -> dict[str, Any]:
    owner = getattr(function, "__self__", None)
    return {} if owner is None else {self_name(function): owner}


def _device(tensors: Sequence[torch.Tensor], owner: object) -> torch.device:
    """A GPU that an argument or a parameter lies on; else where the first of them lies."""
    devices = [tensor.device for tensor in tensors]
    if isinstance(owner, nn.Module):
        devices += [parameter.device for parameter in owner.parameters()]
    return gpu_or_first(devices)
