"""Times of paged attention on a CUDA device beside the floor of the hardware.

    python -m bench.attention [--backend triton_paged --backend flash_attn] [--block-size 16] [--block-size 64]

Decode is bound by bytes (every key and value is read once), prefill by operations. Calls are timed inside a captured graph that goes
through enough different caches to leave the L2 behind; the number is the median over replays. Metadata lies on the device, as under FULL.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rung.attention import AttentionBackend, AttentionMetadata, AttentionSpec, HostMetadata, KVCache
from rung.attention.select import select_backend
from rung.errors import BackendUnavailableError

BYTES_A_SECOND = 4.2e12  # read, measured on an H200
OPERATIONS_A_SECOND = 790e12  # dense bf16 on random data, measured on an H200
LLAMA_8B = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5)
SMALL = AttentionSpec(num_heads=9, num_kv_heads=3, head_size=64, scale=64**-0.5)
_BEYOND_L2 = 256 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    batch: int
    query_len: int
    context: int  # keys of each request, this step's included
    block_size: int
    flat: bool = False  # a first chunk whose keys and values are read from the flat batch

    def floor_us(self, spec: AttentionSpec) -> float:
        tokens = self.batch * self.query_len
        read = self.batch * self.context * spec.num_kv_heads * spec.head_size * 2 * 2 + tokens * spec.num_heads * spec.head_size * 2 * 2
        seen = self.query_len * (2 * self.context - self.query_len + 1) / 2
        operations = 4 * self.batch * seen * spec.num_heads * spec.head_size
        return 1e6 * max(read / BYTES_A_SECOND, operations / OPERATIONS_A_SECOND)


@dataclass(frozen=True, kw_only=True)
class Row:
    backend: str
    shape: Shape
    measured_us: float
    floor_us: float
    note: str = ""

    def __str__(self) -> str:
        shape = self.shape
        layout = "flat" if shape.flat else shape.block_size
        return (
            f"{self.backend:16} B {shape.batch:4} query {shape.query_len:5} context {shape.context:6} block {layout:>4} "
            f"{self.measured_us:9.1f} us  floor {self.floor_us:8.1f} us  x {self.measured_us / self.floor_us:6.2f}  {self.note}"
        )


@dataclass(frozen=True)
class Inputs:
    query: torch.Tensor
    cache: KVCache
    metadata: AttentionMetadata
    flat: tuple[torch.Tensor, torch.Tensor] | tuple[()]  # key and value of a first chunk


def inputs(spec: AttentionSpec, shape: Shape, *, dtype: torch.dtype = torch.bfloat16) -> Iterator[Inputs]:
    """Enough different inputs to exceed the L2 together; 32 at most."""
    device = torch.device("cuda")
    columns = -(-shape.context // shape.block_size)
    blocks = shape.batch * columns
    size = blocks * shape.block_size * spec.num_kv_heads * spec.head_size * dtype.itemsize * 2
    tokens = shape.batch * shape.query_len
    starts = torch.arange(0, tokens + 1, shape.query_len, dtype=torch.int32)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32)
    for _ in range(max(1, min(32, -(-_BEYOND_L2 // size)))):
        cache = KVCache(
            *(torch.randn(blocks, shape.block_size, spec.num_kv_heads, spec.head_size, device=device, dtype=dtype) for _ in range(2))
        )
        metadata = AttentionMetadata(
            query_start_loc=starts.to(device),
            seq_lens=lengths.to(device),
            block_table=torch.randperm(blocks, device=device).to(torch.int32).view(shape.batch, columns),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            num_requests=shape.batch,
            num_actual_tokens=tokens,
            max_query_len=shape.query_len,
            max_seq_len=shape.context,
            host=HostMetadata(query_start_loc=starts.numpy(), seq_lens=lengths.numpy()) if shape.flat else None,
            may_pad=False,
        )
        yield Inputs(
            query=torch.randn(tokens, spec.num_heads, spec.head_size, device=device, dtype=dtype),
            cache=cache,
            metadata=metadata,
            flat=(cache.key.flatten(0, 1)[:tokens], cache.value.flatten(0, 1)[:tokens]) if shape.flat else (),
        )


def time_graph_us(calls: Sequence[Callable[[], None]], *, replays: int = 15) -> float:
    """Median device time of one call, from replays of a graph that makes all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def measure(backend: AttentionBackend, shape: Shape, note: str = "", *, sets: Sequence[Inputs] = (), replays: int = 15) -> Row:
    """The time of one call; `sets` are inputs of this shape, made here when there are none."""
    sets = sets or list(inputs(backend.spec, shape))
    out = torch.empty_like(sets[0].query)

    def call(one: Inputs) -> Callable[[], None]:
        if one.flat:
            return lambda: backend.forward_given_keys(one.query, *one.flat, one.cache, out, one.metadata)
        return lambda: backend.forward(one.query, one.cache, out, one.metadata)

    measured = time_graph_us([call(one) for one in sets], replays=replays)
    return Row(backend=backend.name, shape=shape, measured_us=measured, floor_us=shape.floor_us(backend.spec), note=note)


def decode_shapes(batches: Sequence[int], contexts: Sequence[int], block_sizes: Sequence[int]) -> list[Shape]:
    return [Shape(batch=b, query_len=1, context=c, block_size=s) for s, b, c in itertools.product(block_sizes, batches, contexts)]


def prefill_shapes(lengths: Sequence[int], block_sizes: Sequence[int]) -> list[Shape]:
    return [Shape(batch=1, query_len=n, context=n, block_size=s) for s, n in itertools.product(block_sizes, lengths)]


def table(shapes: Sequence[Shape], backends: Sequence[str], spec: AttentionSpec = LLAMA_8B) -> list[Row]:
    """One row for each shape and each of `backends` that can serve it; prints what cannot."""
    rows = []
    for shape, name in itertools.product(shapes, backends):
        try:
            backend, _ = select_backend(spec, torch.bfloat16, torch.device("cuda"), shape.block_size, name)
        except BackendUnavailableError as error:
            print(error.message)
            continue
        rows.append(measure(backend(spec), shape))
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="default: triton_paged and flash_attn")
    parser.add_argument("--block-size", action="append", type=int, help="default: 16, 64 and 256 (256 for prefill alone)")
    parser.add_argument("--batch", action="append", type=int, help="default: 1, 8, 64, 256")
    parser.add_argument("--context", action="append", type=int, help="of decodes; default: 128, 1024, 8192, 32768")
    parser.add_argument("--prefill", action="append", type=int, help="default: 1024, 2048, 4096, 8192, 16384")
    options = parser.parse_args()
    block_sizes = options.block_size or [16, 64, 256]
    backends = options.backend or ["triton_paged", "flash_attn"]
    lengths = options.prefill or [1024, 2048, 4096, 8192, 16384]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {LLAMA_8B}")
    shapes = decode_shapes(
        options.batch or [1, 8, 64, 256], options.context or [128, 1024, 8192, 32768], [s for s in block_sizes if s < 256]
    )
    print(*table(shapes, backends), sep="\n")
    print(*table(prefill_shapes(lengths, block_sizes), backends), sep="\n")
    flat = [replace(shape, flat=True) for shape in prefill_shapes(lengths, block_sizes[:1])]
    print(*table(flat, ["triton_paged"]), sep="\n")
    small = decode_shapes(options.batch or [1, 8, 64, 256], [128, 1024], [16])
    print("9 query and 3 KV heads of 64:", *table(small, backends, SMALL), sep="\n")


if __name__ == "__main__":
    main()
