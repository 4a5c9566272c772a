"""Launches of the decode kernel in CUDA C++ beside Triton's planned one, on a CUDA device of compute capability 9.0.

    python -m bench.decode_sweep [--model 8b,135m] [--batch 1,8,64,256] [--context 144,188,1024,4096] [--bound 4096]

us a call in a captured graph over inputs larger than the L2, pages of 16, without programmatic launch; floor: bytes at 4.2 TB/s. For each
cell: Triton's planned launch for requests of up to `--bound` keys, the planned launch of ours, and the best three (us, warps, blocks of a
cluster, tiles a warp). Outputs of all are compared first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import astuple, replace

import torch

from bench.attention import LLAMA_8B, SMALL, Inputs, Shape, inputs, time_graph_us
from rung.attention import AttentionSpec, KVCache
from rung.attention.backends.decode_attention import DecodeLaunch, decode_attention, plan_decode
from rung.attention.backends.launch_plan import plan_launch
from rung.attention.backends.triton_paged import TritonPaged
from rung.launch import multiprocessors

_SPECS = {"8b": LLAMA_8B, "135m": SMALL}
_SHARED_BYTES, _WARPS = 220 << 10, 2600  # of a block; a device has room for 2112


def launches(spec: AttentionSpec, batch: int, kept_size: int) -> Iterator[DecodeLaunch]:
    programs, tile = batch * spec.num_kv_heads, 16 * spec.head_size * kept_size
    for warps, blocks, slots in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (4, 6) if tile <= 2048 else (3, 4)):
        useful = programs * warps * blocks <= _WARPS or (blocks == 1 and warps <= 4)
        if useful and warps * slots * tile <= _SHARED_BYTES and (blocks == 1 or programs * blocks <= 264) and programs * warps >= 24:
            yield DecodeLaunch(warps=warps, blocks=blocks, slots=slots)


def narrowed(one: Inputs) -> Inputs:
    e4m3 = torch.float8_e4m3fn
    return replace(one, cache=KVCache(one.cache.key.to(e4m3), one.cache.value.to(e4m3), 0.5, 0.5))


def cell(spec: AttentionSpec, batch: int, context: int, bound: int, *, e4m3: bool) -> str:
    shape, kept_size = Shape(batch=batch, query_len=1, context=context, block_size=16), 1 if e4m3 else 2
    sets = list(itertools.islice(inputs(spec, shape), 12))
    sets = [narrowed(one) for one in sets] if e4m3 else sets
    out, wanted = torch.empty_like(sets[0].query), torch.empty_like(sets[0].query)
    size = {"num_tokens": batch, "num_requests": batch, "max_query_len": 1, "max_seq_len": bound, "block_size": 16, "kept_size": kept_size}
    triton = TritonPaged(spec, plan_launch(spec, **size, processors=multiprocessors(torch.device("cuda"))))
    before = time_graph_us([lambda one=one: triton.forward(one.query, one.cache, wanted, one.metadata) for one in sets], replays=9)
    triton.forward(sets[0].query, sets[0].cache, wanted, sets[0].metadata)
    planned = plan_decode(spec, batch, bound, kept_size=kept_size)
    found = {}
    for launch in dict.fromkeys((planned, *launches(spec, batch, kept_size))):

        def call(one: Inputs, launch: DecodeLaunch = launch) -> None:
            decode_attention(spec, launch, one.query, one.cache, out, one.metadata, None, programmatic=False)

        call(sets[0])
        error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
        assert error < 1e-2, f"{launch} is off by {error}"
        found[launch] = time_graph_us([lambda one=one, call=call: call(one) for one in sets], replays=9)
    best = sorted((us, *astuple(launch)) for launch, us in found.items())[:3]
    shown = ", ".join(f"{us:.1f} {of}" for us, *of in best)
    floor = shape.floor_us(spec) / (2 if e4m3 else 1)
    name = f"{spec.num_heads}/{spec.num_kv_heads} of {spec.head_size} B {batch:4} context {context:6} {'e4m3' if e4m3 else 'bf16'}"
    return f"{name} floor {floor:7.1f} triton {before:7.1f} planned {found[planned]:7.1f} {list(astuple(planned))}; best {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b,135m")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--context", default="144,188,1024,4096")
    parser.add_argument("--bound", type=int, default=4096, help="the longest request that a graph must serve")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for model, batch, context, e4m3 in itertools.product(
        options.model.split(","), map(int, options.batch.split(",")), map(int, options.context.split(",")), (False, True)
    ):
        print(cell(_SPECS[model], batch, context, options.bound, e4m3=e4m3), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
