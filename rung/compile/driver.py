"""Compile a function, or load it: cold and warm are one road.

A cold start writes plan and blobs and then loads them exactly as a warm start does; the compiler's own callables are thrown away after
they have been compared once with the loaded ones.
"""

from __future__ import annotations

import copy
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rung import torch_compat
from rung.cache import Store, key_of
from rung.compile import plan as plan_module
from rung.compile.arguments import leaves
from rung.compile.bound import StepCall
from rung.compile.build import SplitGraph, build_steps
from rung.compile.compiled import CompiledFunction
from rung.compile.dump import Dump
from rung.compile.fingerprint import fingerprint
from rung.compile.paths import Path
from rung.compile.pieces import Piece, refuse_aliased_writes
from rung.compile.plan import CompilePlan, TensorSpec
from rung.compile.selfcheck import check_piece
from rung.compile.sources import current_digest, type_refs
from rung.compile.trace import DynamicDims, TracedGraph, self_name, trace
from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import ArtifactError, CacheError, CompileError
from rung.passes import PassManager

_SETTINGS = {
    # kernels choose among their few configurations at the first call, before any capture; compiling must not run them
    "triton.autotune_at_compile_time": False,
    # the entry checks arguments once a call; pieces need not check again
    "size_asserts": False,
    "scalar_asserts": False,
}


@dataclass(slots=True)
class CompileReport:
    """What one compile did and how long each phase took."""

    plan_key: str = ""
    source: str = ""  # "compiled" or "loaded"
    reason: str = ""  # why it was not loaded
    seconds: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    unique_pieces: int = 0
    passes: list[dict[str, Any]] = field(default_factory=list)  # one a unique piece


class Driver:
    """Compiles functions with one configuration into one store."""

    def __init__(self, config: CompileConfig, store: Store, counters: Counters) -> None:
        self.config = config
        self.store = store
        self.counters = counters
        self.passes = PassManager()

    def compile(
        self, function: Callable[..., Any], locals_: Mapping[str, Any], tensors: Sequence[tuple[Path, torch.Tensor]], dims: DynamicDims
    ) -> tuple[CompiledFunction, CompileReport]:
        """Trace and compile `function` for the bound arguments `locals_` (self excluded), or load it from the store.

        `tensors` are the tensor arguments, `dims` the dynamic dimensions as argument -> {dim: name}."""
        report = CompileReport()
        owner = _owner(function)
        factors, opaque = self._plan_factors(function, locals_, tensors, dims)
        report.plan_key = key_of(factors)
        clock = _Clock(report.seconds)
        plan = None if opaque else self._find_plan(report, tensors)
        if opaque:
            report.reason = f"not cacheable: attribute {opaque[0]!r} cannot be described"
        blobs: dict[str, bytes] = {}
        if plan is None:
            plan, blobs = self._build(function, locals_, tensors, dims, report, clock, factors, keep=not opaque)
        else:
            self.counters.add(Count.PLAN_HITS)
            report.source = "loaded"
        try:
            compiled = self._load(plan, blobs, owner, report, clock)
        except ArtifactError as error:
            if report.source == "compiled":
                raise
            warnings.warn(f"a stored artifact could not be used and is built again: {error.message}", RuntimeWarning, stacklevel=2)
            report.reason = error.message
            plan, blobs = self._build(function, locals_, tensors, dims, report, clock, factors, keep=True)
            compiled = self._load(plan, blobs, owner, report, clock)
        report.pieces = sum(step.piece is not None for step in plan.steps)
        report.unique_pieces = len(plan.pieces)
        Dump.of(plan.entry, report.plan_key).loaded(plan, compiled)
        return compiled, report

    # --- keys ------------------------------------------------------------------------------------------------------------------------

    def _plan_factors(
        self, function: Callable[..., Any], locals_: Mapping[str, Any], tensors: Sequence[tuple[Path, torch.Tensor]], dims: DynamicDims
    ) -> tuple[dict[str, Any], list[str]]:
        owner = getattr(function, "__self__", None)
        described, opaque = fingerprint(owner) if isinstance(owner, nn.Module) else ({}, [])
        constants = [(path, value) for path, value in leaves(locals_) if not isinstance(value, torch.Tensor)]
        factors = {
            "format": plan_module.FORMAT,
            "entry": f"{function.__module__}:{function.__qualname__}",
            "module": described,
            "dynamic": {name: {str(dim): symbol for dim, symbol in d.items()} for name, d in dims.items()},
            "maximum": self.config.maximum,
            "split_ops": sorted(self.config.split_ops),
            "tensors": {path.dotted(): [str(t.dtype), t.device.type, self._shape(path, t, dims)] for path, t in tensors},
            "constants": [[path.expression(), f"{type(value).__name__} {value!r}"] for path, value in constants],
            **self._code_factors(_device(tensors, owner)),
        }
        return factors, opaque

    def _code_factors(self, device: torch.device) -> dict[str, Any]:
        return {
            "passes": self.passes.uuid(),
            "inductor": {**_SETTINGS, **{key: repr(value) for key, value in self.config.inductor.items()}},
            "python": ".".join(platform.python_version_tuple()[:2]),
            "default_dtype": str(torch.get_default_dtype()),  # ops without a dtype take it
            **torch_compat.toolchain_factors(),
            **torch_compat.device_factors(device),
        }

    @staticmethod
    def _shape(path: Path, tensor: torch.Tensor, dims: DynamicDims) -> list[int | str]:
        named = dims.get(path.dotted(), {})
        return [named.get(dim, extent) for dim, extent in enumerate(tensor.shape)]

    # --- warm ------------------------------------------------------------------------------------------------------------------------

    def _find_plan(self, report: CompileReport, tensors: Sequence[tuple[Path, torch.Tensor]]) -> CompilePlan | None:
        try:
            manifest = self.store.get_manifest("plans", report.plan_key)
        except ArtifactError as error:
            report.reason = error.message
            return None
        if manifest is None:
            report.reason = "no plan under this key"
            return None
        try:
            plan = CompilePlan.from_json(manifest["plan"])
        except (KeyError, TypeError, IndexError, ValueError):
            report.reason = "the plan under this key is damaged"
            return None
        if not _fits(plan, tensors):
            report.reason = "the plan under this key serves another size"
            return None
        for ref in plan.sources:
            if current_digest(ref) != ref.digest:
                report.reason = f"the source of {ref.qualname} changed or cannot be found"
                return None
        return plan

    # --- cold ------------------------------------------------------------------------------------------------------------------------

    def _build(
        self,
        function: Callable[..., Any],
        locals_: Mapping[str, Any],
        tensors: Sequence[tuple[Path, torch.Tensor]],
        dims: DynamicDims,
        report: CompileReport,
        clock: _Clock,
        factors: dict[str, Any],
        *,
        keep: bool,
    ) -> tuple[CompilePlan, dict[str, bytes]]:
        self.counters.add(Count.PLAN_MISSES)
        report.source = "compiled"
        entry = f"{function.__module__}:{function.__qualname__}"
        dump = Dump.of(entry, report.plan_key)
        with clock("trace"), torch_compat.quiet_compiler():
            traced = trace(function, locals_, dims, maximum=self.config.maximum)
            self.counters.add(Count.DYNAMO_TRACES)
        dump.traced(traced)
        with clock("split"):
            graph = build_steps(traced, SPLIT_OPS | set(self.config.split_ops))
        pieces, blobs = self._compile_pieces(graph, traced, _device(tensors, getattr(function, "__self__", None)), report, clock, dump)
        plan = CompilePlan(
            entry=entry,
            inputs=traced.inputs,
            tensors=tuple((path, self._spec(path, tensor, dims, traced)) for path, tensor in tensors),
            bounds=traced.bounds,
            pieces=pieces,
            steps=graph.steps,
            outputs=graph.outputs,
            template=traced.template,
            sources=(*traced.sources, *type_refs(traced.template)),
            written=graph.written,
            reads=traced.reads,
        )
        if keep:
            with clock("save"):
                self._save(lambda: self.store.put_manifest("plans", report.plan_key, {"factors": factors, "plan": plan.to_json()}))
        self._check(graph, plan, blobs, _owner(function))
        return plan, blobs

    def compile_traced(self, traced: TracedGraph) -> CompiledFunction:
        """Compile a graph whose guards somebody else keeps; pieces come from and go to the store, the plan does not."""
        report = CompileReport(source="compiled", reason="traced by torch.compile")
        clock = _Clock(report.seconds)
        dump = Dump.of("torch_compile:graph", key_of({"id": id(traced)}))
        dump.traced(traced)
        placeholders = [node for node in traced.graph_module.graph.nodes if node.op == "placeholder"]
        device = next((v.device for n in placeholders if isinstance(v := n.meta["example_value"], torch.Tensor)), torch.device("cpu"))
        graph = build_steps(traced, SPLIT_OPS | set(self.config.split_ops))
        pieces, blobs = self._compile_pieces(graph, traced, device, report, clock, dump)
        plan = CompilePlan("", traced.inputs, (), {}, pieces, graph.steps, graph.outputs, traced.template, ())
        self._check(graph, plan, blobs, {})
        return self._load(plan, blobs, {}, report, clock)

    def _compile_pieces(
        self, graph: SplitGraph, traced: TracedGraph, device: torch.device, report: CompileReport, clock: _Clock, dump: Dump
    ) -> tuple[tuple[tuple[str, str], ...], dict[str, bytes]]:
        self.counters.add(Count.PIECES, sum(step.piece is not None for step in graph.steps))
        self.counters.add(Count.UNIQUE_PIECES, len(graph.pieces))
        code = self._code_factors(device)
        blobs, pieces = {}, []
        with clock("compile"):
            for index, piece in enumerate(graph.pieces):
                digest, blob = self._piece_blob(piece, traced, code, report, dump, index)
                blobs[digest] = blob
                pieces.append((piece.key, digest))
        return tuple(pieces), blobs

    def _spec(self, path: Path, tensor: torch.Tensor, dims: DynamicDims, traced: TracedGraph) -> TensorSpec:
        named = {dim: traced.unified.get(name, name) for dim, name in dims.get(path.dotted(), {}).items()}
        shape = tuple(named[dim] if named.get(dim) in traced.bounds else extent for dim, extent in enumerate(tensor.shape))
        return TensorSpec(str(tensor.dtype), tensor.device.type, shape)

    def _piece_blob(
        self, piece: Piece, traced: TracedGraph, code: Mapping[str, Any], report: CompileReport, dump: Dump, index: int
    ) -> tuple[str, bytes]:
        factors = {"piece": piece.key, "bounds": sorted(str(bound) for bound in traced.bounds.values()), **code}
        key = key_of(factors)
        try:
            manifest = self.store.get_manifest("pieces", key)
            if manifest is not None:
                blob = self.store.get_blob(manifest["blob"])
                report.passes.append(manifest["passes"])
                return manifest["blob"], blob
        except ArtifactError as error:
            warnings.warn(f"a stored piece could not be used and is built again: {error.message}", RuntimeWarning, stacklevel=2)
        dump.piece(index, piece)
        refuse_aliased_writes(piece)
        passes = PassManager(self.passes.passes)
        blob = self._compile_piece(piece, traced, passes, index)
        report.passes.append(passes.report)
        digest = self._save(lambda: self.store.put_blob(blob)) or f"unsaved-{index}"
        self._save(lambda: self.store.put_manifest("pieces", key, {"factors": factors, "blob": digest, "passes": passes.report}))
        return digest, blob

    def _compile_piece(self, piece: Piece, traced: TracedGraph, passes: PassManager, index: int) -> bytes:
        """Compile with hinted sizes, which fuse; without hints when that code would not serve every size."""
        try:
            with torch_compat.quiet_compiler():
                artifact, restrictions = self._inductor(piece, traced, passes, hinted=True)
                if restrictions:
                    self.counters.add(Count.UNHINTED_COMPILES)
                    artifact, _ = self._inductor(piece, traced, passes, hinted=False)
                return torch_compat.serialize_artifact(artifact)
        except Exception as error:
            raise CompileError(
                f"Inductor could not compile piece {index}: {type(error).__name__}: {str(error).strip().splitlines()[0][:300]}",
                hint="RUNG_DUMP=<folder> writes the piece; TORCH_LOGS=+inductor tells more",
            ) from error

    def _inductor(self, piece: Piece, traced: TracedGraph, passes: PassManager, *, hinted: bool) -> tuple[Any, list[str]]:
        """An artifact, and what Inductor assumed about the sizes from 2 on."""
        fresh = torch_compat.FreshSymbols(hinted=hinted)
        inputs = []
        for node in piece.graph_module.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["example_value"]
                for symbol in sorted(torch_compat.free_symbols(value), key=str):
                    fresh.symbol(str(symbol), high=traced.bounds.get(traced.symbols.get(str(symbol), "")))
                inputs.append(fresh.tensor(value) if isinstance(value, torch.Tensor) else fresh.integer(value))
        # ranges, hints and the default dtype are not in Inductor's own key
        tag = repr((hinted, torch.get_default_dtype(), sorted(map(str, traced.bounds.values()))))
        module = copy.deepcopy(piece.graph_module)
        fresh.propagate(module, inputs)
        options = {**_SETTINGS, **self.config.inductor, **passes.inductor_options(tag)}
        artifact = torch_compat.compile_piece(module, fresh, inputs, options)
        self.counters.add(Count.INDUCTOR_COMPILES)
        return artifact, fresh.restrictions()

    def _save(self, write: Callable[[], Any]) -> Any:
        """A store that cannot be written costs the next start, never this run."""
        try:
            result = write()
        except CacheError as error:
            warnings.warn(error.message, RuntimeWarning, stacklevel=2)
            return None
        self.counters.add(Count.ARTIFACT_WRITES)
        return result

    def _check(self, graph: SplitGraph, plan: CompilePlan, blobs: Mapping[str, bytes], owner: Mapping[str, Any]) -> None:
        for index, piece in enumerate(graph.pieces):
            step = next(step for step in plan.steps if step.piece == index)
            weights = [
                plan.inputs[n].resolve(owner) if n < len(plan.inputs) and plan.inputs[n].local in owner else None for n in step.inputs
            ]
            check_piece(piece, blobs[plan.pieces[index][1]], weights)
            piece.graph_module.graph = torch.fx.Graph()  # the fake tensors on its nodes keep the whole trace alive

    # --- load ------------------------------------------------------------------------------------------------------------------------

    def _load(
        self, plan: CompilePlan, blobs: Mapping[str, bytes], owner: Mapping[str, Any], report: CompileReport, clock: _Clock
    ) -> CompiledFunction:
        with clock("load"), torch_compat.quiet_compiler():
            pieces: list[StepCall] = []
            texts: list[str] = []
            for _, digest in plan.pieces:
                blob = blobs[digest] if digest in blobs else self.store.get_blob(digest)
                call, text = load_piece(blob)
                pieces.append(call)
                texts.append(text)
                self.counters.add(Count.ARTIFACT_LOADS)
            return CompiledFunction(plan, pieces, owner, texts)


def _fits(plan: CompilePlan, tensors: Sequence[tuple[Path, torch.Tensor]]) -> bool:
    """Whether the tensors have the sizes that the trace fixed although they might have been dynamic."""
    specs = dict(plan.tensors)
    return all(
        path in specs and all(extent in (size, str(extent)) for extent, size in zip(specs[path].shape, tensor.shape, strict=True))
        for path, tensor in tensors
    )


SPLIT_OPS = frozenset({"rung::attention", "rung::kv_cache_write"})


def load_piece(blob: bytes) -> tuple[StepCall, str]:
    """The callable of a piece (Inductor's own entry, below AOTAutograd's runtime wrapper of 7 to 11 us a call) and its source."""
    artifact = torch_compat.deserialize_artifact(blob)
    raw = torch_compat.raw_callable(artifact)
    if raw is None:
        raise ArtifactError("an artifact has no callable inside", hint="clear the store: rung cache clear")
    return raw, torch_compat.artifact_source(artifact)


def _owner(function: Callable[..., Any]) -> dict[str, Any]:
    owner = getattr(function, "__self__", None)
    return {} if owner is None else {self_name(function): owner}


def _device(tensors: Sequence[tuple[Path, torch.Tensor]], owner: object) -> torch.device:
    if tensors:
        return tensors[0][1].device
    if isinstance(owner, nn.Module):
        for parameter in owner.parameters():
            return parameter.device
    return torch.device("cpu")


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def __call__(self, phase: str) -> _Phase:
        return _Phase(self.seconds, phase)


class _Phase:
    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self.seconds, self.phase = seconds, phase

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + time.perf_counter() - self.start
