"""Launches of the Triton attention kernel, tried on a CUDA device.

    python -m bench.attention_sweep [--cells decode,prefill,small] [--jobs 14] [--out FOLDER]

For every cell: the time of FlashAttention where there is one, of the planned launch, and of the best others. Kernels are compiled before,
in `--jobs` processes. All rows go to FOLDER/sweep.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.attention import LLAMA_8B, SMALL, Row, Shape, inputs, measure
from rung.attention import AttentionSpec
from rung.attention.backends.flash_attn import FlashAttention3
from rung.attention.backends.launch_plan import Launch, plan_launch
from rung.attention.backends.triton_paged import TritonPaged

_PROCESSORS = 132


@dataclass(frozen=True)
class Cell:
    spec: AttentionSpec
    shape: Shape

    @property
    def block_size(self) -> int:
        return 0 if self.shape.flat else self.shape.block_size

    def planned(self) -> Launch:
        shape = self.shape
        size = {"num_tokens": shape.batch * shape.query_len, "num_requests": shape.batch}
        return plan_launch(
            self.spec, **size, max_query_len=shape.query_len, max_seq_len=shape.context, block_size=self.block_size, processors=_PROCESSORS
        )

    def launches(self) -> list[Launch]:
        return list(dict.fromkeys([self.planned(), *(self._decode() if self.shape.query_len == 1 else self._prefill())]))

    def _decode(self) -> Iterator[Launch]:
        tiles = [(32, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4)]
        planned = self.planned()
        for splits in sorted({max(1, planned.splits // 2), planned.splits, planned.splits * 2} if planned.splits > 1 else {1}):
            for block_n, warps, stages in tiles:
                yield replace(planned, block_n=block_n, num_warps=warps, num_stages=stages, splits=splits)

    def _prefill(self) -> Iterator[Launch]:
        group = self.spec.num_heads // self.spec.num_kv_heads
        tiles = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3)]
        for block_m, block_n, warps, stages in tiles:
            tile = {"block_m": block_m, "block_q": block_m // group, "block_n": block_n, "num_warps": warps, "num_stages": stages}
            yield replace(self.planned(), **tile, splits=1)

    def image(self, launch: Launch) -> tuple[object, ...]:
        """What the kernel's code depends on."""
        return self.spec, self.block_size, replace(launch, splits=min(2, launch.splits))


def cells(names: Sequence[str]) -> Iterator[Cell]:
    if "prefill" in names:
        for length in (1024, 2048, 4096, 8192, 16384):
            for block_size in (16, 64, 256):
                yield Cell(LLAMA_8B, Shape(batch=1, query_len=length, context=length, block_size=block_size))
            yield Cell(LLAMA_8B, Shape(batch=1, query_len=length, context=length, block_size=16, flat=True))
    if "decode" in names:
        for batch, context, block_size in itertools.product((1, 8, 64, 256), (128, 1024, 8192, 32768), (16, 64)):
            yield Cell(LLAMA_8B, Shape(batch=batch, query_len=1, context=context, block_size=block_size))
    if "small" in names:
        for batch, context in itertools.product((1, 8, 64), (128, 1024)):
            yield Cell(SMALL, Shape(batch=batch, query_len=1, context=context, block_size=16))


def prepare(names: Sequence[str], part: int, parts: int) -> None:
    """Compile this part of the kernels by running each once on a small batch."""
    images = {cell.image(launch): (cell, launch) for cell in cells(names) for launch in cell.launches()}
    for cell, launch in list(images.values())[part::parts]:
        query_len = 1 if cell.shape.query_len == 1 else 64
        shape = replace(cell.shape, batch=1, query_len=query_len, context=64)
        one = next(inputs(cell.spec, shape))
        try:
            measure(TritonPaged(cell.spec, replace(launch, splits=min(2, launch.splits))), shape, sets=[one], replays=1)
        except Exception as error:  # out of shared memory or registers: a launch that does not exist on this device
            print(f"{launch}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.cuda.synchronize()


def sweep(cell: Cell, *, best: int = 3) -> tuple[list[Row], list[Row]]:
    """FlashAttention, the planned launch, and the best others; and all rows. Launches that the device refuses are left out."""
    shape = cell.shape
    sets = list(inputs(cell.spec, shape))
    rows, others = [], []
    if FlashAttention3.why_not(cell.spec, torch.bfloat16, torch.device("cuda"), shape.block_size) is None:
        rows.append(measure(FlashAttention3(cell.spec), shape, sets=sets, replays=7))
    for number, launch in enumerate(cell.launches()):
        try:
            row = measure(TritonPaged(cell.spec, launch), shape, note=_shown(launch), sets=sets, replays=7)
        except Exception:  # see prepare
            continue
        if number:
            others.append(row)
        else:
            rows.append(replace(row, note="planned " + row.note))
    others.sort(key=lambda row: row.measured_us)
    return rows + others[:best], rows + others


def _shown(launch: Launch) -> str:
    return " ".join(f"{name.replace('num_', '').replace('block_', '')}{int(value)}" for name, value in asdict(launch).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="prefill,decode,small")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--prepare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.cells.split(",")
    if options.prepare is not None:
        prepare(names, options.prepare, options.jobs)
        return
    command = [sys.executable, "-m", "bench.attention_sweep", "--cells", options.cells, "--jobs", str(options.jobs), "--prepare"]
    workers = [subprocess.Popen([*command, str(part)]) for part in range(options.jobs)]
    for worker in workers:
        worker.wait()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with (options.out / "sweep.jsonl").open("w") as file:
        for cell in cells(names):
            shown, every = sweep(cell)
            print(*shown, sep="\n", flush=True)
            for row in every:
                print(json.dumps({**asdict(row), "head_size": cell.spec.head_size}), file=file, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
