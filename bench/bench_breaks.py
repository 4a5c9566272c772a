"""What the attention breaks of a piecewise replay cost the host, with graphs and kernels that do nothing. No GPU needed, but Triton.

    python -m bench.bench_breaks --layers 32 --requests 8

Three ways: the Python of every break, the same while its launches are written down, and the launches alone. What a launch itself costs,
2 to 3 us on a device, is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from rung.attention import Attention, AttentionCall, AttentionMetadata, AttentionSpec, HostMetadata, KVCache
from rung.attention.backends import triton_paged
from rung.attention.layer import attention
from rung.compile.bound import BoundStep, Capture
from rung.context import ForwardContext, set_forward_context
from rung.counters import Counters
from rung.graphs import Descriptor, GraphMode
from rung.graphs.backends.base import CapturedGraph
from rung.graphs.program import GraphLaunch, PreboundBreak, ReplayProgram
from rung.graphs.repeats import BreakRepeats
from rung.launch import Driver, KernelImage, LaunchAttributes, LoadedKernel, Parameter, TritonLauncher
from rung.launch.driver import Launcher
from rung.launch.specialise import specialise
from rung.launch.triton_launcher import Entry

SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=0.09)
HERE = -1  # "device" of a CPU tensor


class NoDriver(Driver):
    """Launches nothing."""

    def capability(self, ordinal: int) -> int:
        return 90

    def stream_calls(self) -> tuple[Callable[[], int], Callable[[int], int]]:
        return lambda: HERE, lambda ordinal: 0

    def device(self, ordinal: int) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, ordinal: int, cubin: bytes) -> Any:
        return cubin

    def unload(self, ordinal: int, module: Any) -> None:
        return None

    def function(self, ordinal: int, module: Any, name: str) -> Any:
        return name

    def allow_shared(self, ordinal: int, function: Any, num_bytes: int) -> None:
        return None

    def allow_large_clusters(self, ordinal: int, function: Any) -> None:
        return None

    def prepare(self, ordinal: int, function: Any, attributes: LaunchAttributes, table_address: int) -> Launcher:
        return lambda x, y, z, stream: None


class NoKernel(TritonLauncher):
    """The launcher of a kernel of ours, with an image that has its parameters and no code."""

    def _entry(self, values: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]) -> Entry:
        kinds = specialise(self.parameters, values, constants).kinds
        parameters = tuple(Parameter(name, kind) for name, kind in kinds.items())
        image = KernelImage(cubin=b"", entry=self.name, capability=90, parameters=parameters, num_warps=options["num_warps"])
        return Entry(LoadedKernel(image, HERE, self.driver), [p.name for p in self.parameters if not p.constexpr])


class NoGraph(CapturedGraph):
    def replay(self) -> None:
        return None

    def release(self) -> None:
        return None


class Step:
    """Decodes of one size through so many layers."""

    def __init__(self, layers: int, requests: int) -> None:
        backend, self.requests = triton_paged.TritonPaged(SPEC), requests
        self.layers = {f"layers.{index}": Attention(f"layers.{index}", SPEC) for index in range(layers)}
        for layer in self.layers.values():
            half = torch.zeros(2, 16, SPEC.num_kv_heads, SPEC.head_size, dtype=torch.bfloat16)
            layer.kv_cache, layer.backend = KVCache(half, half.clone()), backend
        query = torch.zeros(requests, SPEC.num_heads, SPEC.head_size, dtype=torch.bfloat16)
        key = torch.zeros(requests, SPEC.num_kv_heads, SPEC.head_size, dtype=torch.bfloat16)
        self.actions: list[GraphLaunch | PreboundBreak] = []
        for name in self.layers:
            self.actions += [GraphLaunch("piece", NoGraph()), PreboundBreak(_break(name), (query, key, key, torch.empty_like(query)), ())]
        self._starts = torch.arange(requests + 1, dtype=torch.int32)
        self._lens = torch.full((requests,), 256, dtype=torch.int32)
        self._table = torch.zeros(requests, 64, dtype=torch.int32)
        self._slots = torch.zeros(requests, dtype=torch.int64)

    def context(self) -> ForwardContext:
        """As a runner makes it: new objects over the same memory."""
        metadata = AttentionMetadata(
            query_start_loc=self._starts,
            seq_lens=self._lens,
            block_table=self._table,
            slot_mapping=self._slots,
            num_requests=self.requests,
            num_actual_tokens=self.requests,
            max_query_len=1,
            max_seq_len=256,
            host=HostMetadata(query_start_loc=self._starts.numpy(), seq_lens=np.full(self.requests, 256, np.int32)),
        )
        return ForwardContext(attention_metadata=dict.fromkeys(self.layers, metadata), attention_layers=self.layers)


def _break(name: str) -> BoundStep:
    def call(arguments: list[Any]) -> Sequence[Any]:
        attention(*arguments, name)
        return ()

    return BoundStep("break", name, call, Capture.FULL, lambda arguments: AttentionCall(*arguments, name))


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, our attention kernels do nothing."""
    names = [name for name, value in vars(triton_paged).items() if isinstance(value, TritonLauncher)]
    before = {name: getattr(triton_paged, name) for name in (*names, "multiprocessors")}
    for name in names:
        setattr(triton_paged, name, NoKernel(before[name].module, before[name].name, driver=NoDriver(), road="prebound"))
    triton_paged.multiprocessors = lambda device: 132  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(triton_paged, name, value)


def measure(step: Step, repeats: BreakRepeats | None, *, forget: bool, rounds: int) -> float:
    """Median us a step."""
    program = ReplayProgram(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=step.requests), step.actions, (), (), repeats)
    times = []
    for _ in range(rounds):
        context = step.context()
        if forget and program._repeats is not None:
            program._repeats.forget()
        start = time.perf_counter()
        with set_forward_context(context):
            program.replay()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    step, counters = Step(arguments.layers, arguments.requests), Counters()
    with without_kernels():
        ways = {
            "Python": measure(step, None, forget=False, rounds=arguments.rounds),
            "Python, written down": measure(step, BreakRepeats(counters), forget=True, rounds=arguments.rounds),
            "launches alone": measure(step, BreakRepeats(counters), forget=False, rounds=arguments.rounds),
        }
    for name, total in ways.items():
        print(f"{name:24}{total:10.1f} us a step{total / arguments.layers:8.2f} us a break")
    print(counters.snapshot())


if __name__ == "__main__":
    main()
