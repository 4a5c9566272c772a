"""One unique piece through Inductor, or out of the store."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import platform
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rung import torch_compat
from rung.cache import Factor, Factors, Manifest, Store, key_of
from rung.compile.artifact import Artifact, make_artifact
from rung.compile.compile_errors import compile_error
from rung.compile.dump import Dump
from rung.compile.early_kernels import EarlyKernels
from rung.compile.pieces import Piece, refuse_aliased_writes
from rung.compile.report import CompileReport
from rung.compile.sizes import SizeRange
from rung.compile.trace import TracedGraph
from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import ArtifactError, CacheError, CacheMissError
from rung.passes import PassManager
from rung.passes.defaults import pass_manager
from rung.passes.manager import Observer

FORMAT = 3  # of the bytes of a piece and of its manifest
MISS_HINT = "`rung cache explain` tells more; build it with `rung precompile`, or leave out --require-hit (RUNG_REQUIRE_HIT)"
SETTINGS = {
    # kernels choose among their few configurations at the first call, before any capture; compiling must not run them
    "triton.autotune_at_compile_time": False,
    # the entry checks arguments once a call; pieces need not check again, where torch leaves the choice
    "size_asserts": torch_compat.needs_size_asserts(),
    "scalar_asserts": False,
    # random numbers come from torch's generators, as in eager mode: one seed gives one result on both roads
    "fallback_random": True,
}
# Independent pointwise kernels of one piece, such as the rotations of query and key, become one launch.
# A user's Triton kernels are kept as machine code as well.
CUDA_SETTINGS = {"combo_kernels": True, "combo_kernels_pointwise_only": True, "static_launch_user_defined_triton_kernels": True}


def settings(device_type: str) -> dict[str, Any]:
    """What rung sets in Inductor for pieces on such a device."""
    return SETTINGS | CUDA_SETTINGS if device_type == "cuda" else SETTINGS


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A compiled piece: its key in the store, the digest of its `Artifact`, all blobs by their digests, and the largest size that its code
    serves where no maximum was given (None: any)."""

    key: str
    digest: str
    blobs: Mapping[str, bytes]
    bound: int | None
    saved: bool = True  # whether the store has it

    @property
    def artifact(self) -> Artifact:
        return Artifact.from_bytes(self.blobs[self.digest])


class PieceCompiler:
    """Compiles pieces with one configuration; artifacts come from and go to one store."""

    def __init__(self, config: CompileConfig, store: Store, counters: Counters) -> None:
        self.config = config
        self.store = store
        self.counters = counters
        self.passes = pass_manager(config)
        self._device = torch.device("cpu")  # of the pieces

    def factors(self, device: torch.device) -> Factors:
        """What changes the code of a piece besides the piece itself, from everything that has a say in it, on the device of the pieces."""
        self._device = device
        named = {
            "piece_format": FORMAT,
            "passes": {"all": self.passes.uuid(), **{item.name: item.uuid() for item in self.passes.passes}},
            "inductor": {**settings(device.type), **{key: repr(value) for key, value in self.config.inductor.items()}},
            "python": ".".join(platform.python_version_tuple()[:2]),
            "default_dtype": str(torch.get_default_dtype()),  # ops without a dtype take it
            **torch_compat.toolchain_factors(device.type),
            **torch_compat.device_factors(device),
            "extra": {key: repr(value) for key, value in sorted(self.config.factors.items())},
        }
        return Factors(Factor(name, value) for name, value in named.items())

    def blob(
        self,
        index: int,
        piece: Piece,
        traced: TracedGraph,
        code: Factors,
        report: CompileReport,
        dump: Dump,
        sizes: SizeRange | None = None,
        early: EarlyKernels | None = None,
    ) -> StoredPiece:
        """The artifact of a unique piece, for `sizes` of the dynamic dimension alone if they are given; `code` are the factors that change
        code. `early` sees what the passes leave. Raises `CompileError` when Inductor cannot."""
        factors = self._factors_of(piece.key, traced, code, sizes)
        key = key_of(factors)
        found = self._find(key, report)
        if found is not None:
            return found
        with self.store.lock("pieces", key) as again:
            found = self._find(key, report) if again else None
            return found or self._build(index, piece, traced, (key, factors), report, dump, sizes, early)

    def stored(self, piece_key: str, code: Factors, sizes: SizeRange, report: CompileReport) -> StoredPiece | None:
        """The artifact of a piece for `sizes`, if the store has it and it was compared with its graph; no trace is needed to ask."""
        return self._find(key_of(self._factors_of(piece_key, None, code, sizes)), report, compared=True)

    def confirm(self, piece: StoredPiece) -> None:
        """Note in the store that a piece was compared with its graph, for those that are loaded without a plan (`stored`)."""
        with contextlib.suppress(ArtifactError):
            manifest = self.store.get("pieces", piece.key)
            if manifest is not None and not manifest.data.get("compared"):
                self.save(lambda: self.store.put(replace(manifest, data={**manifest.data, "compared": True})))

    def forget(self, piece: StoredPiece) -> None:
        """Take a piece that differs from its graph out of the store: its key does not tell what a mended op returns."""
        self.store.remove("pieces", piece.key)

    @staticmethod
    def _factors_of(piece_key: str, traced: TracedGraph | None, code: Factors, sizes: SizeRange | None) -> dict[str, Any]:
        if sizes is not None:
            return {"piece": piece_key, "sizes": [sizes.low, sizes.high], **code.values(code_only=True)}
        assert traced is not None
        bounds = sorted(str(bound) for bound in traced.bounds.values())
        return {"piece": piece_key, "bounds": bounds, **code.values(code_only=True)}

    def _find(self, key: str, report: CompileReport, *, compared: bool = False) -> StoredPiece | None:
        """A piece in the store, with `compared` only one that was compared with its graph."""
        try:
            manifest = self.store.get("pieces", key)
            if manifest is None or (compared and not manifest.data.get("compared")):
                return None
            blobs = {digest: self.store.get_blob(digest) for digest in manifest.blobs}
            found = StoredPiece(key, manifest.blobs[0], blobs, manifest.data["bound"])
            if not found.artifact.serves(self._device):
                return None
        except ArtifactError as error:
            warnings.warn(f"a stored piece could not be used and is built again: {error.message}", RuntimeWarning, stacklevel=2)
            return None
        report.passes.append(manifest.data["passes"])
        report.add_piece(manifest.seconds["compile"], hit=True)
        self.counters.add(Count.PIECE_HITS)
        return found

    def _build(
        self,
        index: int,
        piece: Piece,
        traced: TracedGraph,
        keyed: tuple[str, Mapping[str, Any]],
        report: CompileReport,
        dump: Dump,
        sizes: SizeRange | None,
        early: EarlyKernels | None,
    ) -> StoredPiece:
        key, factors = keyed
        if self.store.require_hit:
            why = self.store.explain_miss("pieces", factors)
            raise CacheMissError(f"piece {index} would have to be compiled: {why}", hint=MISS_HINT)
        if sizes is None:
            dump.piece(index, piece)
        refuse_aliased_writes(piece)
        passes = self.passes.fresh(_observer(index, dump.graph_passes(index) if sizes is None else None, early))
        passes.check()
        start = time.perf_counter()
        compiled, bound = self._compile(piece, traced, passes, index, sizes)
        seconds = time.perf_counter() - start
        report.passes.append(passes.as_json())
        report.add_piece(seconds, hit=False)
        blobs: dict[str, bytes] = {}

        def put(data: bytes) -> str:
            digest = hashlib.sha256(data).hexdigest()
            blobs[digest] = data
            return digest

        with torch_compat.quiet_compiler():
            artifact = make_artifact(compiled, put)
        digest = put(artifact.to_bytes())
        stock_only = f"{artifact.reason}: {artifact.detail}" if artifact.reason else ""
        data = {"passes": passes.as_json(), "bound": bound, "stock_only": stock_only}
        named = (digest, *artifact.blobs)
        manifest = Manifest(kind="pieces", key=key, factors=factors, seconds={"compile": seconds}, blobs=named, data=data)
        saved = self.save(lambda: [self.store.put_blob(blob) for blob in blobs.values()]) is not None
        if saved:
            self.save(lambda: self.store.put(manifest))
        return StoredPiece(key, digest, blobs, bound, saved)

    def _compile(
        self, piece: Piece, traced: TracedGraph, passes: PassManager, index: int, sizes: SizeRange | None = None
    ) -> tuple[bytes, int | None]:
        """Compile with hinted sizes, which fuse; without hints when that code would not serve every size. A bound of the code becomes one
        of the sizes that have no maximum, if somebody checks them (`traced.bounds` names them)."""
        try:
            with torch_compat.quiet_compiler():
                artifact, fresh = self._inductor(piece, traced, passes, sizes, hinted=True)
                bound = fresh.bound() if traced.bounds and sizes is None else None
                if bound is None and fresh.restrictions():
                    self.counters.add(Count.UNHINTED_COMPILES)
                    artifact, _ = self._inductor(piece, traced, passes, sizes, hinted=False)
                if not passes.report:
                    self._run_passes(piece, traced, passes, sizes)
                return torch_compat.serialize_artifact(artifact), bound
        except Exception as error:
            raise compile_error(index, error, traced.graph_module.graph) from error

    def _inductor(
        self, piece: Piece, traced: TracedGraph, passes: PassManager, sizes: SizeRange | None, *, hinted: bool, stop: bool = False
    ) -> tuple[Any, torch_compat.FreshSymbols]:
        """An artifact, and the symbols that know what Inductor assumed about the sizes. With `stop` the compile ends behind the passes, by
        raising `StopCompile`."""
        fresh = torch_compat.FreshSymbols(hinted=hinted)
        inputs = []
        for node in piece.graph_module.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["example_value"]
                for symbol in sorted(torch_compat.free_symbols(value), key=str):
                    high = traced.bounds.get(traced.symbols.get(str(symbol), ""))
                    fresh.symbol(str(symbol), *((high,) if sizes is None else (sizes.high, sizes.low)))
                inputs.append(fresh.tensor(value) if isinstance(value, torch.Tensor) else fresh.integer(value))
        # ranges, hints and the default dtype are not in Inductor's own key; where its hits lose guards there are none
        once = uuid.uuid4().hex if fresh.has_hints and torch_compat.loses_guards() else ""
        tag = repr((hinted, torch.get_default_dtype(), sorted(map(str, traced.bounds.values())), sizes and (sizes.low, sizes.high), once))
        module = copy.deepcopy(piece.graph_module)
        fresh.propagate(module, inputs)
        on_cuda = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs)
        options = {**settings("cuda" if on_cuda else "cpu"), **self.config.inductor, **passes.inductor_options(tag, stop=stop)}
        artifact = torch_compat.compile_piece(module, fresh, inputs, options)
        self.counters.add(Count.INDUCTOR_COMPILES)
        return artifact, fresh

    def _run_passes(self, piece: Piece, traced: TracedGraph, passes: PassManager, sizes: SizeRange | None) -> None:
        """Run the passes for their report alone: Inductor took the piece from a cache of its own, and called none of them."""
        with contextlib.suppress(torch_compat.StopCompile):
            self._inductor(piece, traced, passes, sizes, hinted=True, stop=True)

    def save(self, write: Callable[[], Any]) -> Any:
        """A store that cannot be written costs the next start, never this run."""
        try:
            result = write()
        except CacheError as error:
            warnings.warn(error.message, RuntimeWarning, stacklevel=2)
            return None
        self.counters.add(Count.ARTIFACT_WRITES)
        return result


def _observer(index: int, dump: Observer | None, early: EarlyKernels | None) -> Observer | None:
    """Both of them."""
    if early is None:
        return dump

    def observe(number: int, name: str, graph: fx.Graph) -> None:
        if dump is not None:
            dump(number, name, graph)
        if name == "lowering":
            early.see(index, graph)

    return observe
