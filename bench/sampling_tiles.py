"""Tiles of greedy sampling, each measured as the two launches of `TritonDecodeOps.pick`, all in one CUDA graph over sets of logits that do
not fit in the L2 cache together (`python -m bench.sampling --tiles`). Needs a GPU."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import torch

from bench.linear import timed
from rung.launch import rehearse_launches
from rung.runner.ops.decode_base import MAX_STOP_IDS, RowSampling
from rung.runner.ops.triton_decode import ChunkTiles, TritonDecodeOps

BYTES_A_US = 4.2e6
VOCABS = (49152, 128256)
_SET_BYTES = 200_000_000


def candidates() -> Iterator[TritonDecodeOps]:
    for block, steps, warps in itertools.product((1024, 2048, 4096, 8192), (1, 2, 4, 8), (4, 8)):
        each = block // (32 * warps)  # tokens of a block in a thread; 8 are one load
        if 8 <= each <= 32 and block * steps <= 32768 and each * steps <= 128:
            tiles = ChunkTiles(block=block, steps=steps, num_warps=warps)
            yield TritonDecodeOps(tiles=tiles, programmatic=True)
    yield TritonDecodeOps(tiles=ChunkTiles(block=2048, steps=1, num_warps=4), programmatic=False)


def _arguments(rows: int, device: str, temperature: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, RowSampling]:
    idx = torch.zeros(rows, dtype=torch.int64, device=device)
    stop_ids = torch.full((1, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
    sampling = RowSampling(temperature=torch.full((1,), temperature, device=device), seed=torch.zeros_like(idx[:1]), stop_ids=stop_ids)
    return idx, idx.to(torch.int32), sampling


def compile_all(found: list[TritonDecodeOps]) -> str:
    """Build every image, on every core; before the device is touched."""
    start = time.perf_counter()
    with rehearse_launches(90) as rehearsal:
        for ops, vocab in itertools.product(found, VOCABS):
            ops.pick(torch.empty(1, vocab, dtype=torch.bfloat16, device="meta"), *_arguments(1, "meta"), any_random=False)
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        built = rehearsal.build(submit=pool.submit)
    return f"{built.images} images, {built.compiled} of them compiled in {time.perf_counter() - start:.1f} s"


def measure(ops: TritonDecodeOps, sets: list[torch.Tensor], temperature: float = 0.0) -> float:
    """us of one pick of all rows of a set."""
    arguments = _arguments(sets[0].shape[0], "cuda", temperature)
    return timed([lambda one=one: ops.pick(one, *arguments, any_random=False) for one in sets])


def sweep(sizes: list[int]) -> list[dict[str, Any]]:
    """us of each candidate for each number of rows and columns, greedy and with noise; each gives torch's greedy tokens."""
    found, in_use = list(candidates()), TritonDecodeOps()
    print(compile_all([*found, *(TritonDecodeOps(tiles=in_use.tiles(rows), programmatic=True) for rows in sizes)]), flush=True)
    lines = []
    for rows, vocab in itertools.product(sizes, VOCABS):
        nbytes = rows * vocab * 2
        count = max(3, min(64, _SET_BYTES // nbytes))
        sets = [torch.randn(rows, vocab, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        expected, measured = sets[0].argmax(dim=-1), []
        for ops in found:
            assert torch.equal(ops.pick(sets[0], *_arguments(rows, "cuda"), any_random=False), expected), ops.tiles(rows)
            line = {"rows": rows, "vocab": vocab, "floor_us": nbytes / BYTES_A_US, "programmatic": ops.programmatic}
            line |= {"us": measure(ops, sets), "noise_us": measure(ops, sets, 1.0)}
            measured.append({**line, **asdict(ops.tiles(rows))})
        best = sorted(measured, key=lambda line: line["us"])
        shown = "; ".join(
            f"{line['us']:.2f} {line['noise_us']:.1f} "
            f"[{line['block']}x{line['steps']} w{line['num_warps']}{'' if line['programmatic'] else ' plain'}]"
            for line in [*best[:7], measured[-1]]
        )
        mine = f"{measure(in_use, sets):.2f} {measure(in_use, sets, 1.0):.1f}"
        print(f"{rows:4} x {vocab:6} floor {nbytes / BYTES_A_US:6.2f} in use (greedy, noise) {mine} | {shown}", flush=True)
        lines += measured
    return lines
