"""CUDA graphs through `torch.cuda.CUDAGraph`, all captured on one side stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rung.compile.bound import BoundStep
from rung.errors import InternalError
from rung.graphs.backends.base import CapturedGraph, GraphBackend, GraphPool
from rung.graphs.backends.capture_stream import capture_stream
from rung.graphs.backends.cuda_order import CudaStepOrder
from rung.graphs.backends.driver import count_captured_nodes, upload_graph, why_no_driver
from rung.graphs.backends.finalisers import finalise, finalisers_parked
from rung.launch import launch_road, launches_early
from rung.torch_compat import end_allocation_to_pool

_TYPESTR = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # by item size; the true type is put back with view(dtype)


class _Span:
    """Memory at an address, for `torch.as_tensor`; owns nothing."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, item_size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": None if strides is None else tuple(stride * item_size for stride in strides),
            "typestr": _TYPESTR[item_size],
            "version": 3,
        }


class CudaPool(GraphPool):
    """A private pool of the caching allocator. Its handle dies with its last graph, so a tiny graph lives as long as the pool."""

    shares = True

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._keepers: list[torch.cuda.CUDAGraph] = []
        self._handles: list[Any] = []
        self._segments: list[tuple[int, int]] = []  # (address, bytes)
        self.renew()

    @property
    def handle(self) -> Any:
        """The handle that captures are given."""
        return self._handles[-1]

    def renew(self) -> None:
        """Let later captures use a new private pool: after a capture that could not be ended the allocator may refuse the old one."""
        handle = torch.cuda.graph_pool_handle()
        keeper = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._backend.device), self._backend.session():
            anything = torch.zeros(1, device=self._backend.device)
            keeper.capture_begin(pool=handle, capture_error_mode="thread_local")
            anything.zero_()  # an empty graph would warn
            keeper.capture_end()
        self._anything = anything
        self._keepers.append(keeper)
        self._handles.append(handle)

    def owns(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        if tensor.device.type != "cuda" or not address:
            return False
        if not self._covers(address):
            self._refresh()
        return self._covers(address)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.element_size() not in _TYPESTR or not self.owns(tensor):
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            return tensor
        span = _Span(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())
        return torch.as_tensor(span, device=tensor.device).view(tensor.dtype)

    def bytes(self) -> int:
        self._refresh()
        return sum(size for _, size in self._segments)

    def executable_bytes(self) -> int:
        """All device memory in use outside of the caching allocator, of other processes too."""
        device = self._backend.device
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)

    def poison(self) -> None:
        self._refresh()
        for address, size in self._segments:
            torch.as_tensor(_Span(address, (size,), None, 1), device=self._backend.device).fill_(0xFF)

    def _covers(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self._segments)

    def _refresh(self) -> None:
        self._segments = [
            (segment["address"], segment["total_size"])
            for handle in self._handles
            for segment in torch.cuda.memory_snapshot(handle, include_traces=False)  # of everything it costs milliseconds
            if tuple(segment["segment_pool_id"]) == tuple(handle)
        ]


class CudaGraph(CapturedGraph):
    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        if self.graph is None:
            raise InternalError("a released CUDA graph was replayed")
        self.graph.replay()

    def release(self) -> None:
        if self.graph is not None:
            finalise(self.graph.reset)
            self.graph = None

    def __del__(self) -> None:
        self.release()  # of a manager that was dropped, perhaps while another one captures


class CudaBackend(GraphBackend):
    name = "cuda"
    # Drivers hand memory to graphs in pieces of 2 MiB, some from a reserve, so a few captures say little. Measured over 1718 graphs with
    # 31227 nodes of the 8B shape (H200, driver 580, `python -m bench.memory`).
    executable_cost = (145_000.0, 1_350.0)

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"tensors on {device} cannot be captured in CUDA graphs"
        return None if torch.cuda.is_available() else "torch sees no CUDA device"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._shared = capture_stream(device)
        self._stream = self._shared.stream

    def why_no_nodes(self) -> str | None:
        return why_no_driver()

    def repeats_launches(self) -> bool:
        # Elsewhere launches have the gaps between kernels that graphs have at their ends, or go through Triton, which keeps their tensors.
        return launches_early(self.device) and launch_road() == "prebound"

    def new_pool(self) -> CudaPool:
        return CudaPool(self)

    def new_order(self) -> CudaStepOrder:
        return CudaStepOrder(self.device)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    @contextmanager
    def session(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.device)
        if outer == self._stream:
            yield
            return
        with self._shared.lock, finalisers_parked():
            self._stream.wait_stream(outer)
            try:
                with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                    yield
            finally:
                outer.wait_stream(self._stream)

    @contextmanager
    def capture(self, pool: GraphPool, generators: Sequence[torch.Generator] = ()) -> Iterator[CapturedGraph]:
        assert isinstance(pool, CudaPool)
        captured = CudaGraph()
        graph = captured.graph
        assert graph is not None
        for generator in generators:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            yield captured
        except BaseException:
            self._abandon(captured, pool)
            raise
        captured.nodes = count_captured_nodes(self._stream.cuda_stream)
        try:
            graph.capture_end()
        except BaseException:
            self._give_up(captured, pool)
            raise

    def call_piece(self, step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
        return step.call(arguments)

    def settle(self, graph: CapturedGraph) -> None:
        graph.replay()

    def upload(self, graph: CapturedGraph) -> None:
        assert isinstance(graph, CudaGraph)
        if graph.graph is not None:
            upload_graph(graph.graph.raw_cuda_graph_exec(), self._stream.cuda_stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def reclaim(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def _abandon(self, captured: CudaGraph, pool: CudaPool) -> None:
        """End a capture whose body failed. The error that counts is the one that is already on its way."""
        assert captured.graph is not None
        try:
            captured.graph.capture_end()
        except Exception:
            self._give_up(captured, pool)
        else:
            captured.release()

    def _give_up(self, captured: CudaGraph, pool: CudaPool) -> None:
        """After a capture that was invalidated and could not be ended in order."""
        captured.graph = None
        with suppress(Exception):
            end_allocation_to_pool(self.device, pool.handle)
        with suppress(Exception):
            pool.renew()
