"""Graphs without a GPU: calls are recorded at the launch boundary and replayed without the Python code that made them.

A call is an ATen operation, a whole compiled piece, whose kernels torch cannot see, or a Triton kernel of ours in the interpreter. Host
values are frozen, tensors are kept by storage, and results land at the addresses of the capture, so what would be stale on CUDA is stale
here. Two things differ: a capture executes its work once, and memory that eager code reads through numpy or ctypes is invisible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar

import torch

from rung.compile.bound import BoundStep
from rung.errors import CaptureError, InternalError
from rung.graphs.backends.base import CapturedGraph, GraphBackend, GraphPool, NodeCounts
from rung.graphs.backends.recorded_memory import RecordedPool, alias_of, plain_tensors, storage_key
from rung.graphs.device_reads import waits_for_device
from rung.launch import watched_launches
from rung.torch_compat import (
    TorchDispatchMode,
    call_device_kernel,
    generator_key,
    is_python_op,
    map_tensors,
    no_dispatch_modes,
    storage_use_count,
    tree_leaves,
)

_EMPTY = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"})


class Record:
    """One call with frozen arguments and the place of its fresh results."""

    __slots__ = ("arguments", "call", "keywords", "results")

    def __init__(self, call: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        self.call = call
        self.arguments = arguments
        self.keywords = keywords
        self.results: list[tuple[int, torch.Tensor]] = []  # (index among the flat results, alias of the captured result)

    def replay(self) -> None:
        outputs = self.call(*self.arguments, **self.keywords)
        if self.results:
            flat = (outputs,) if isinstance(outputs, torch.Tensor) else tree_leaves(outputs)
            for index, target in self.results:
                _land(flat[index], target)


class RecordedGraph(CapturedGraph):
    """Records in order; `index` is its place in the history of the pool."""

    def __init__(self, pool: RecordedPool, index: int) -> None:
        self._pool = pool
        self._index = index
        self._gone: list[int] = []
        self._written: set[int] = set()
        self.records: list[Record] = []
        self.released = False

    def finish(self) -> None:
        self.nodes = NodeCounts(kernels=len(self.records))
        self._pool.records += len(self.records)
        self._gone = self._pool.end_graph(self._index)
        self._written = self._pool.born_in(self._index)
        self._pool.written(self._written.difference(self._gone))

    def replay(self) -> None:
        if self.released:
            raise InternalError("a released graph was replayed")
        self._pool.scramble_for(self._index)
        with plain_tensors(), _without_autocast():
            for record in self.records:
                record.replay()
        self._pool.written(self._written)
        self._pool.scramble(self._gone)

    def release(self) -> None:
        if self.nodes is not None and not self.released:
            self._pool.records -= len(self.records)
        self.released = True
        self.records = []


class _Recorder(TorchDispatchMode):
    """Executes what is dispatched and writes it down."""

    def __init__(self, pool: RecordedPool, index: int, graph: RecordedGraph, generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self._index = index
        self._graph = graph
        self._generators = {generator_key(generator) for generator in (torch.default_generator, *generators)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if is_python_op(func):
            with self:
                return call_device_kernel(func, "cpu", args, keywords)
        self._check(func, args, keywords)
        record = Record(func, self._freeze(args), self._freeze(keywords))
        outputs = func(*args, **keywords)
        if func._schema.name in _EMPTY and not func._schema.is_mutable:
            self._pool.add_empty(outputs, self._index)
        elif torch.Tag.inplace_view not in func.tags and (self._land_results(record, outputs) or func._schema.is_mutable):
            self._graph.records.append(record)
        return outputs

    def piece(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        """A compiled piece is one call. Runs outside of the mode."""
        frozen = self._freeze(list(arguments))
        outputs = list(step.call(arguments))
        record = Record(_call_piece, (step.call, frozen), {})
        self._land_results(record, outputs)
        self._graph.records.append(record)
        return outputs

    def launch(self, kernel: Any, grid: tuple[int, int, int], values: Sequence[Any], named: Mapping[str, Any]) -> None:
        """A kernel of ours, which Triton's interpreter runs, is one call too."""
        record = Record(_launch, (kernel, grid, self._freeze(list(values)), dict(named)), {})
        with no_dispatch_modes():  # what the interpreter does with its arguments is not the kernel's work
            _launch(kernel, grid, values, named)
        self._graph.records.append(record)

    def _check(self, func: Any, args: Any, keywords: dict[str, Any]) -> None:
        if waits_for_device(func, args, keywords):
            raise CaptureError(
                f"{func._schema.name} reads device values on the host",
                hint="keep lengths and indices on the device inside a graph, or mark the code with an eager break",
            )
        for value in (*args, *keywords.values()):
            if isinstance(value, torch.Generator) and generator_key(value) not in self._generators:
                raise CaptureError(
                    f"{func._schema.name} draws from a generator that is not registered: every replay would draw the same numbers",
                    hint="pass the generator to the graph manager (generators=[...])",
                )

    def _freeze(self, values: Any) -> Any:
        """Tensors as aliases with the metadata of now, everything else as it is. The pool does not count ours as use."""
        return map_tensors(self._alias, values)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._pool.alias(tensor) if self._pool.owns(tensor) else alias_of(tensor)

    def _land_results(self, record: Record, outputs: Any) -> bool:
        """Note the results with memory of their own. Results inside of an argument are views, or were written in place."""
        given = {storage_key(value) for value in _tensors((record.arguments, record.keywords))}
        shared = Counter(storage_key(value) for value in _tensors(outputs))
        # Nobody else holds memory that the call allocated. A piece may also return a view of a parameter: no memory of the pool.
        fresh = {storage_key(value) for value in _tensors(outputs) if storage_use_count(value) == shared[storage_key(value)]}
        for index, value in enumerate(tree_leaves(outputs)):
            if isinstance(value, torch.Tensor) and value.numel() and storage_key(value) not in given:
                if storage_key(value) in fresh:
                    self._pool.add(value, self._index)
                record.results.append((index, self._alias(value)))
        return bool(record.results)


# The recorder of the running capture. Ambient, because `call_piece` belongs to whatever capture is open in this thread.
_open: ContextVar[_Recorder | None] = ContextVar("rung_recorder", default=None)


class RecordedBackend(GraphBackend):
    """`scramble=False` leaves freed memory alone; only for measurements."""

    name: ClassVar[str] = "recorded"

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"it records CPU tensors, not tensors on {device}"

    def __init__(self, device: torch.device, scramble: bool = True) -> None:
        super().__init__(device)
        self._scramble = scramble

    def new_pool(self) -> RecordedPool:
        return RecordedPool(self._scramble)

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    @contextmanager
    def capture(self, pool: GraphPool, generators: Sequence[torch.Generator] = ()) -> Iterator[CapturedGraph]:
        assert isinstance(pool, RecordedPool)
        if _open.get() is not None:
            raise InternalError("a capture was begun inside of a capture")
        index = pool.begin_graph()
        graph = RecordedGraph(pool, index)
        recorder = _Recorder(pool, index, graph, generators)
        token, watched = _open.set(recorder), watched_launches.set(recorder.launch)
        try:
            with recorder:
                yield graph
        except BaseException:
            graph.release()
            pool.drop_graph(index)
            raise
        finally:
            _open.reset(token)
            watched_launches.reset(watched)
        graph.finish()

    def call_piece(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        recorder = _open.get()
        if recorder is None:
            raise InternalError(f"{step.name} was called outside of a capture")
        recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return recorder.piece(step, arguments)
        finally:
            recorder.__enter__()  # type: ignore[no-untyped-call]

    def settle(self, graph: CapturedGraph) -> None:
        return None  # recording executes

    def upload(self, graph: CapturedGraph) -> None:
        return None  # it lies here already

    def synchronize(self) -> None:
        return None

    def reclaim(self) -> None:
        return None


def _without_autocast() -> AbstractContextManager[Any]:
    """The casts of the capture are in the record already."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _call_piece(call: Callable[[list[Any]], Sequence[Any]], arguments: Sequence[Any]) -> list[Any]:
    return list(call(list(arguments)))


def _launch(kernel: Any, grid: tuple[int, int, int], values: Sequence[Any], named: Mapping[str, Any]) -> None:
    kernel[grid](*values, **named)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _land(fresh: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a result to the address of the capture."""
    if fresh.data_ptr() == target.data_ptr():
        return
    if 0 in target.stride():  # one element stands for many, which copy_ refuses to write: copy the memory behind both
        place, source = target.untyped_storage(), fresh.untyped_storage()
        if fresh.stride() == target.stride() and fresh.storage_offset() == target.storage_offset() and source.nbytes() == place.nbytes():
            place.copy_(source)
            return
    target.copy_(fresh)
