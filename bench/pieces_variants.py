# ruff: noqa: N803
"""What `bench.pieces` measures: a decode step of pieces and breaks, and the ways to run it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from cuda.bindings import driver

from bench.attention import LLAMA_8B, Shape, inputs
from rung.attention.backends.triton_paged import TritonPaged

HIDDEN, QUERY, QKV, MLP = 4096, 4096, 6144, 14336

Work = Callable[[], object]


@triton.jit
def copy_kernel(source, target, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    tl.store(target + row * COLUMNS + column, tl.load(source + row * stride + column))


@triton.jit
def add_norm_kernel(x, residual, weight, out, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    value = tl.load(x + row * COLUMNS + column).to(tl.float32) + tl.load(residual + row * COLUMNS + column).to(tl.float32)
    tl.store(residual + row * COLUMNS + column, value.to(tl.bfloat16))
    value = value * tl.rsqrt(tl.sum(value * value) / COLUMNS + 1e-5)
    tl.store(out + row * COLUMNS + column, (value * tl.load(weight + column).to(tl.float32)).to(tl.bfloat16))


@triton.jit
def silu_and_mul_kernel(both, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * COLUMNS + column).to(tl.float32)
    up = tl.load(both + row * 2 * COLUMNS + COLUMNS + column).to(tl.float32)
    tl.store(out + row * COLUMNS + column, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16))


@torch.library.custom_op("rungbench::attend", mutates_args=("out",))
def attend(qkv: torch.Tensor, out: torch.Tensor) -> None:
    copy_kernel[(qkv.shape[0],)](qkv, out, qkv.stride(0), COLUMNS=QUERY, num_warps=4)


class Weights:
    """Of all layers, random: 14 GB in bfloat16, so that every step reads them from memory."""

    def __init__(self, layers: int) -> None:
        def matrix(rows: int, columns: int) -> list[torch.Tensor]:
            return [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(rows**-0.5) for _ in range(layers)]

        self.layers = layers
        self.qkv, self.o, self.gate_up, self.down = matrix(HIDDEN, QKV), matrix(QUERY, HIDDEN), matrix(HIDDEN, 2 * MLP), matrix(MLP, HIDDEN)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)


class Step:
    """The pieces and breaks of one batch size over static buffers. Piece i runs between break i - 1 and break i."""

    def __init__(self, weights: Weights, rows: int, attention: bool) -> None:
        def buffer(columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

        self.weights, self.rows = weights, rows
        self.start = buffer(HIDDEN)
        self.x, self.residual, self.normed, self.both, self.acted = (buffer(n) for n in (HIDDEN, HIDDEN, HIDDEN, 2 * MLP, MLP))
        self.qkv, self.attended = buffer(QKV), buffer(QUERY)
        self.spare = buffer(HIDDEN), buffer(HIDDEN)
        self.backend = TritonPaged(LLAMA_8B)
        self.sets = list(inputs(LLAMA_8B, Shape(batch=rows, query_len=1, context=128, block_size=16))) if attention else []

    def piece(self, index: int) -> None:
        weights, layer = self.weights, index - 1
        if index == 0:
            self.residual.copy_(self.start)
            self.x.zero_()
        else:
            torch.mm(self.attended, weights.o[layer], out=self.x)
            self._norm()
            torch.mm(self.normed, weights.gate_up[layer], out=self.both)
            silu_and_mul_kernel[(self.rows, MLP // 1024)](self.both, self.acted, COLUMNS=MLP, BLOCK=1024, num_warps=4)
            torch.mm(self.acted, weights.down[layer], out=self.x)
        self._norm()
        if index < weights.layers:
            torch.mm(self.normed, weights.qkv[index], out=self.qkv)

    def _norm(self) -> None:
        add_norm_kernel[(self.rows,)](self.x, self.residual, self.weights.norm, self.normed, COLUMNS=HIDDEN, num_warps=8)

    def write(self, index: int) -> None:
        """The first half of a break: keys and values into the cache."""
        if self.sets:
            one = self.sets[index % len(self.sets)]
            key, value = self.qkv[:, QUERY : QUERY + 1024].unflatten(1, (8, 128)), self.qkv[:, QUERY + 1024 :].unflatten(1, (8, 128))
            self.backend.write_kv(key, value, one.cache, one.metadata.slot_mapping)
        else:
            copy_kernel[(self.rows,)](self.qkv[:, QUERY:], self.spare[0], QKV, COLUMNS=2048, num_warps=4)

    def attend(self, index: int) -> None:
        """The second half: attention, or a copy."""
        if self.sets:
            one = self.sets[index % len(self.sets)]
            query, out = self.qkv[:, :QUERY].unflatten(1, (32, 128)), self.attended.unflatten(1, (32, 128))
            self.backend.forward(query, one.cache, out, one.metadata)
        else:
            copy_kernel[(self.rows,)](self.qkv, self.attended, QKV, COLUMNS=QUERY, num_warps=4)

    def brk(self, index: int) -> None:
        self.write(index)
        self.attend(index)

    def fresh(self, index: int) -> None:
        """A break that returns a new tensor, copied to where the next graph reads."""
        self.write(index)
        out = torch.empty_like(self.attended)
        copy_kernel[(self.rows,)](self.qkv, out, QKV, COLUMNS=QUERY, num_warps=4)
        self.attended.copy_(out)

    def through_the_dispatcher(self, index: int) -> None:
        self.write(index)
        torch.ops.rungbench.attend(self.qkv, self.attended)

    def with_input_copies(self, index: int) -> None:
        """A break, and copies of the next piece's inputs, as if each piece owned its buffers."""
        self.brk(index)
        self.spare[0].copy_(self.residual)
        self.spare[1].copy_(self.attended)


class Prebound:
    """A compiled Triton kernel with its parameters packed once, launched by the driver."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], pointers: Sequence[torch.Tensor], number: int) -> None:
        values: list[Any] = [ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers]
        values += [ctypes.c_int32(number), ctypes.c_void_p(None), ctypes.c_void_p(None)]  # the scratch pointers come last
        self._keep = values, (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._arguments = (
            driver.CUfunction(kernel.function), grid[0], 1, 1, 32 * kernel.metadata.num_warps, 1, 1, kernel.metadata.shared,
        )  # fmt: skip
        self._parameters = ctypes.addressof(self._keep[1])

    def __call__(self) -> None:
        check(driver.cuLaunchKernel(*self._arguments, torch.cuda.current_stream().cuda_stream, self._parameters, 0))


def check(result: tuple[Any, ...]) -> Any:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


class Graphs:
    """Captures into one pool on one stream."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, *works: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            for work in works:
                work()
        graph.instantiate()
        return graph


def raw_launch(graph: torch.cuda.CUDAGraph) -> Work:
    """Without torch around the launch."""
    executable = driver.CUgraphExec(graph.raw_cuda_graph_exec())
    return lambda: driver.cuGraphLaunch(executable, torch.cuda.current_stream().cuda_stream)


def one_of_children(graphs: Sequence[torch.cuda.CUDAGraph]) -> Work:
    """One executable whose nodes are the graphs, one after the other."""
    parent, before = check(driver.cuGraphCreate(0)), []
    for graph in graphs:
        child = driver.CUgraph(graph.raw_cuda_graph())
        before = [check(driver.cuGraphAddChildGraphNode(parent, before, len(before), child))]
    executable = check(driver.cuGraphInstantiate(parent, 0))
    return lambda: driver.cuGraphLaunch(executable, torch.cuda.current_stream().cuda_stream)


def variants(step: Step) -> Iterator[tuple[str, list[Work]]]:
    """(name, what one step calls in order); the comment of each says what differs from an earlier one."""
    count = step.weights.layers
    graph = Graphs()

    def piece(index: int) -> Work:
        return lambda: step.piece(index)

    def call(work: Callable[[int], None], index: int) -> Work:
        return lambda: work(index)

    def between(graphs: Sequence[Work], breaks: Sequence[Work]) -> list[Work]:
        return [work for index, first in enumerate(graphs) for work in (first, *breaks[index : index + 1])]

    pieces = [piece(index) for index in range(count + 1)]
    breaks = [call(step.brk, index) for index in range(count)]
    for work in between(pieces, breaks):  # load and compile everything
        work()
    captured = [graph(work) for work in pieces]
    replays = [one.replay for one in captured]
    yield "full", [graph(*between(pieces, breaks)).replay]
    yield "full, no break work", [graph(*pieces).replay]
    yield "33 graphs, no break work", replays  # the cut alone
    yield "33 graphs, no break work, raw launch", [raw_launch(one) for one in captured]  # torch's replay() out of the way
    yield "33 graphs, triton launches", between(replays, breaks)
    joined = [graph(work, *([call(step.write, index)] if index < count else [])).replay for index, work in enumerate(pieces)]
    yield "33 graphs, kv write joined", between(joined, [call(step.attend, index) for index in range(count)])
    break_graphs = [graph(work) for work in breaks]
    yield "33 graphs, breaks as graphs", between(replays, [one.replay for one in break_graphs])
    everything = [one for index, one in enumerate(captured) for one in (one, *break_graphs[index : index + 1])]
    yield "one executable of 65 children", [one_of_children(everything)]
    yield "8 joined runs", [graph(*between(pieces, breaks)[start : start + 9]).replay for start in range(0, 2 * count + 1, 9)]
    if step.sets:
        return
    write = copy_kernel[(step.rows,)](step.qkv[:, QUERY:], step.spare[0], QKV, COLUMNS=2048, num_warps=4)
    attended = copy_kernel[(step.rows,)](step.qkv, step.attended, QKV, COLUMNS=QUERY, num_warps=4)
    prebound = [
        Prebound(write, (step.rows,), (step.qkv[:, QUERY:], step.spare[0]), QKV),
        Prebound(attended, (step.rows,), (step.qkv, step.attended), QKV),
    ]
    yield "33 graphs, prebound launches", between(replays, [lambda: [launch() for launch in prebound]] * count)
    # Three suspects of the prototype's piecewise run.
    yield "33 graphs, break through the dispatcher", between(replays, [call(step.through_the_dispatcher, i) for i in range(count)])
    yield "33 graphs, fresh result copied", between(replays, [call(step.fresh, i) for i in range(count)])
    yield "33 graphs, inputs copied", between(replays, [call(step.with_input_copies, i) for i in range(count)])
