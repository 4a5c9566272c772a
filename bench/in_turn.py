"""Tiles of products beside each other inside of a decode step: one graph for each choice, used in turn within one decode. Needs a GPU.

    python -m bench.in_turn --requests 256 --choices in_use,one_block+cublas_o+cublas_down,one_block,cublas_down
    python -m bench.in_turn --requests 64,192 --choices in_use,fp8_triton --quantize fp8 --kv-cache-dtype fp8

For steps at the device's power limit, where what a kernel saves in power comes back as clock for all of them: kernels timed alone, and even
the same graph timed in two generations, say little there. All graphs are captured by one engine over the same buffers, and no prompt
is computed in between. A turn is `--steps` steps, of which the first ten are not counted; each choice stands at every place of
the order once, so that all see the same contexts. ms a step: the mean over the turns, and its difference to the first choice. Choices
joined by + are one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench.steady import decoding
from rung.cli.assembly import open_decoder
from rung.cli.options import QUANTISATIONS, resolve_device, resolve_dtype
from rung.graphs import Descriptor, GraphMode
from rung.passes.kernels import fp8_product, projections
from rung.passes.kernels import tiles as tables
from rung.passes.kernels.launches import Tiles
from rung.passes.kernels.tiles import _sharing, _wide
from rung.runner import Engine, ModelRunner, RunnerConfig, build_engine
from rung.runner.graph_forward import GraphForward

SETTLING = 10  # steps of a turn that are not counted: the device's clock follows

Choice = Mapping[str, Tiles | None]  # by product of the 8B shape, what it gets instead of what is in use; None: cuBLAS
_FEW_FP8 = Tiles(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=0, splits=4)
PRODUCTS = {(6144, 4096): "qkv", (4096, 4096): "o", (14336, 4096): "gate_up", (4096, 14336): "down"}
CHOICES: dict[str, Choice] = {
    "in_use": {},
    "one_block": {"gate_up": _wide(1, 64)},
    "triton_gate_up": {"gate_up": Tiles(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4, prefetch=256)},
    **{f"cublas_{name}": {name: None} for name in PRODUCTS.values()},
    "cluster_down": {"down": _sharing(2, 64, 256, 5)},
    "cluster_few_o": {"o": _sharing(2, 64, 64, 9)},
    "cluster_few_down": {"down": _sharing(2, 64, 64, 9)},
    "parts_o": {"o": _wide(2, 64, 64, 6, parts=2)},
    "parts_down": {"down": _wide(2, 64, 64, 6, parts=2)},
    "wide_qkv": {"qkv": _wide(2, 64, 48, 8)},
    "fp8_triton_gate_up": {"gate_up": Tiles(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4, prefetch=256)},
    "fp8_triton_o": {"o": _FEW_FP8},
    "fp8_triton_down": {"down": _FEW_FP8},
    "fp8_cluster_few_o": {"o": _sharing(2, 128, 64, 9)},
    "fp8_cluster_few_down": {"down": _sharing(2, 128, 64, 9)},
    "fp8_wide_o": {"o": _wide(2, 128, 32, 8)},
    "fp8_one_block_qkv": {"qkv": _wide(1, 128, 48, 8)},
}


def joined(names: str) -> Choice:
    """What the choices of some names are together."""
    return {product: tiles for name in names.split("+") for product, tiles in CHOICES[name].items()}


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Inside, products get these tiles, of any number of rows but one."""

    def tiles_for(rows: int, n: int, k: int, **named: Any) -> Tiles | None:
        tiles = tables.tiles_for(rows, n, k, **named)
        if rows == 1 or (name := PRODUCTS.get((n, k), "")) not in choice:
            return tiles
        wanted = choice[name]
        # the last layer's sums are for another kernel, which takes no parts
        return tiles if wanted is not None and wanted.splits > 1 and not named.get("splittable") else wanted

    for module in (projections, fp8_product):
        module.tiles_for = tiles_for  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in (projections, fp8_product):
            module.tiles_for = tables.tiles_for  # type: ignore[attr-defined]


class Turns:
    """Programs of one descriptor of a runner, of which each can be put in its place."""

    def __init__(self, runner: ModelRunner, requests: int) -> None:
        assert isinstance(runner.forward, GraphForward)
        self._manager = runner.forward.manager
        fitting = [one for one in self._manager.captured if one.mode is GraphMode.FULL and one.num_tokens >= requests]
        self.descriptor: Descriptor = min(fitting, key=lambda one: one.num_tokens)
        self._programs = {"": self._manager.program(self.descriptor)}

    def capture(self, name: str) -> int | None:
        """Capture as things are now; returns the number of nodes. The graphs before it stay."""
        captures = self._manager._captures
        captures._warm.discard(self.descriptor.num_tokens)
        with self._manager.backend.session(), torch.inference_mode(False), torch.no_grad():
            entry = captures._capture_one(self.descriptor)
        self._programs[name] = captures.programs[self.descriptor]
        return entry.num_nodes

    def use(self, name: str) -> None:
        self._manager._captures.programs[self.descriptor] = self._programs[name]

    def release(self) -> None:
        """Only the graph that was there before is left."""
        for name, program in self._programs.items():
            if name:
                program.release()
        self.use("")


def measure(
    engine: Engine, turns: Turns, names: Sequence[str], requests: int, context: int, steps: int, vocab: int
) -> dict[str, list[float]]:
    """ms a step of each turn, by name: as many decodes as names, each beginning with the next one."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for first in range(len(names)):
        with decoding(engine, requests, context, steps * (len(names) + 1), vocab) as steady:
            for _ in range(steps):
                steady.step()
            for name in [*names[first:], *names[:first]]:
                turns.use(name)
                for _ in range(SETTLING):
                    steady.step()
                start = time.perf_counter()
                for _ in range(steps - SETTLING):
                    steady.step()
                found[name].append((time.perf_counter() - start) / (steps - SETTLING) * 1e3)
                if len(engine.scheduler.requests) != requests:
                    raise RuntimeError(f"{len(engine.scheduler.requests)} of {requests} requests were left in the turn of {name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-8b")
    parser.add_argument("--requests", default="256", help="comma-separated")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=36, help="of a turn")
    parser.add_argument("--choices", default="in_use,one_block+cublas_o+cublas_down", help="of " + ", ".join(CHOICES))
    parser.add_argument("--quantize", choices=tuple(QUANTISATIONS), help="e4m3 weights")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    options = parser.parse_args()
    sizes = [int(size) for size in options.requests.split(",")]
    names = list(dict.fromkeys(options.choices.split(",")))
    if unknown := [name for joint in names for name in joint.split("+") if name not in CHOICES]:
        parser.error(f"no choices: {', '.join(unknown)}; there are {', '.join(CHOICES)}")
    if options.steps <= SETTLING:
        parser.error(f"a turn is more than {SETTLING} steps")
    device = resolve_device("auto")
    decoder = open_decoder(options.target, resolve_dtype("auto", device), device, shapes=True, quantize=options.quantize)
    chunk = max(8192, *sizes)
    # Early requests decode while the prompts of the others are computed.
    length = options.context + (len(names) + 2) * options.steps + -(-max(sizes) * options.context // chunk) + 64
    config = RunnerConfig(
        max_num_requests=max(sizes),
        max_num_tokens=chunk,
        max_model_len=max(4096, length),
        num_blocks=max(sizes) * -(-length // 16) + 256,
        graphs="full_and_piecewise",
        capture_sizes=tuple(sorted(set(sizes))),
        kv_cache_dtype=options.kv_cache_dtype,
        prefix_cache=False,
        freeze_heap=True,
    )
    engine, runner, _ = build_engine(decoder.module, config)
    for requests in sizes:
        turns = Turns(runner, requests)
        nodes = {}
        for name in names:
            with chosen(joined(name)):
                nodes[name] = turns.capture(name)
        found = measure(engine, turns, names, requests, options.context, options.steps, decoder.config.vocab_size)
        base = statistics.mean(found[names[0]])
        for name in names:
            mean, each = statistics.mean(found[name]), " ".join(f"{ms:.2f}" for ms in found[name])
            print(f"B={requests} {mean:7.3f} ms a step {mean - base:+7.3f}  {nodes[name]} nodes  {name}  {each}", flush=True)
        turns.release()
    engine.executor.shutdown()


if __name__ == "__main__":
    main()
