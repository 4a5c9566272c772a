"""What the kernels around FlashAttention-3 cost a decode layer: time and graph nodes by setting. Needs a GPU and the library.

    RUNG_FLASH_ATTN_LIBRARY=... python -m bench.flash_settings --out settings.json

Each figure is a captured graph of several layers with caches of their own and one batch, over the number of layers. `bound` is the longest
request that the graph must serve. Settings: a schedule for each call or one for all layers, and the most splits of a request's keys.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.attention import LLAMA_8B, Shape, inputs, time_graph_us
from rung.attention import AttentionBackend, AttentionMetadata, AttentionSpec, KVCache
from rung.attention.backends.flash_attn import FlashAttention3
from rung.attention.backends.triton_paged import TritonPaged
from rung.graphs.backends.driver import count_captured_nodes

SMOLLM2 = AttentionSpec(num_heads=9, num_kv_heads=3, head_size=64, scale=64**-0.5)
MODELS = {"8B": LLAMA_8B, "135M": SMOLLM2}
LAYERS = 16


class OneScheduleACall(FlashAttention3):
    """A schedule is made inside of every call, as without `once_a_step`."""

    def _schedule(self, query: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, splits: int) -> Any:
        return None


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    backend: type[AttentionBackend]
    splits: int | None = 0


SETTINGS = [
    Setting(name="a schedule a call", backend=OneScheduleACall),
    Setting(name="one schedule", backend=FlashAttention3),
    Setting(name="1 split", backend=FlashAttention3, splits=1),
    *(Setting(name=f"one schedule, {n} splits", backend=FlashAttention3, splits=n) for n in (4, 8, 16, 32)),
    Setting(name="flash_attn", backend=FlashAttention3, splits=None),
    Setting(name="triton_paged", backend=TritonPaged),
]


def build(setting: Setting, spec: AttentionSpec) -> AttentionBackend:
    backend = setting.backend(spec)
    if isinstance(backend, FlashAttention3):
        backend.num_splits = setting.splits
    return backend


def layers(backend: AttentionBackend, spec: AttentionSpec, shape: Shape, bound: int) -> tuple[list[Callable[[], None]], list[torch.Tensor]]:
    """One call a layer, and their outputs."""
    sets = list(inputs(spec, shape))
    metadata = replace(sets[0].metadata, max_seq_len=bound)
    sets = [sets[number % len(sets)] for number in range(LAYERS)]
    caches = [KVCache(one.cache.key, one.cache.value) for one in sets]
    outs = [torch.empty_like(one.query) for one in sets]

    def call(query: torch.Tensor, cache: KVCache, out: torch.Tensor) -> Callable[[], None]:
        return lambda: backend.forward(query, cache, out, metadata)

    return [call(one.query, cache, out) for one, cache, out in zip(sets, caches, outs, strict=True)], outs


def nodes_a_layer(calls: list[Callable[[], None]]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
        counts = count_captured_nodes(torch.cuda.current_stream().cuda_stream)
    return float("nan") if counts is None else counts.total / len(calls)


def measure(spec: AttentionSpec, shape: Shape, bound: int) -> list[dict[str, Any]]:
    rows = []
    expected: torch.Tensor | None = None
    for setting in SETTINGS:
        torch.manual_seed(0)
        calls, outs = layers(build(setting, spec), spec, shape, bound)
        took = time_graph_us(calls)
        expected = outs[-1].clone() if expected is None else expected
        off = float((outs[-1] - expected).abs().max())
        rows.append({"setting": setting.name, "us": took, "nodes": nodes_a_layer(calls), "off": off})
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8B,135M")
    parser.add_argument("--sizes", default="1,8,64,256")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--bounds", default="4096", help="longest requests that a graph must serve")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for model in options.models.split(","):
        for batch in map(int, options.sizes.split(",")):
            for context in map(int, options.contexts.split(",")):
                for bound in map(int, options.bounds.split(",")):
                    rows = measure(MODELS[model], Shape(batch=batch, query_len=1, context=context, block_size=16), max(bound, context))
                    found += [{"model": model, "batch": batch, "context": context, "bound": bound, **row} for row in rows]
                    cells = "  ".join(f"{row['us']:6.1f} ({row['nodes']:.2f}, {row['off']:.0e})" for row in rows)
                    print(f"{model:5} B {batch:4} context {context:5} bound {bound:5}: {cells}", flush=True)
    print("us (nodes a layer, difference from the first): " + " | ".join(setting.name for setting in SETTINGS))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
