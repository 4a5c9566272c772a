"""The options of one peer's process, and what follows from them. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.shapes import HF_CONFIGS

DECODE_LEN = 4096  # the longest request that the engines of the decode rows take, as where the targets were set
HEAVY = 32768  # prompt tokens of a point from which one prefill has to do for all its runs


@dataclass(frozen=True, slots=True)
class Point:
    """A batch whose steps are timed."""

    batch: int
    context: int  # prompt tokens of each request


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def cores(text: str) -> set[int]:
    """Processors from "0-15" or "0,2,4-7"."""
    found: set[int] = set()
    for part in text.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part)):
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor a range of them")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def add_measured(parser: argparse.ArgumentParser) -> None:
    """What is measured; the same options for the whole run and for one process of it."""
    parser.add_argument("--batches", default="1,8,64,256", help="rows of the decode table")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each request in those rows")
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the one prompt that is prefilled; 0: none")
    parser.add_argument("--sweep-batches", default="", help="batch sizes of the sweep, behind --context tokens")
    parser.add_argument("--sweep-contexts", default="", help="contexts of the sweep")
    parser.add_argument("--context-batches", default="1,8", help="batch sizes at each of those contexts")
    parser.add_argument("--sweep-long", type=int, default=80, help="tokens of each generation of the sweep, at least")
    parser.add_argument("--memory", type=float, default=0.7, help="part of the device's memory that vLLM may take")


def options(description: str | None) -> argparse.Namespace:
    """Those of a process. `--cores` holds from here on, for the threads and processes that it starts too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(HF_CONFIGS), default="8b")
    add_measured(parser)
    parser.add_argument("--positions", type=int, help="positions of the model, where its own are too few")
    parser.add_argument("--max-len", type=int, help="tokens of the longest request of the run, so that all starts of a peer agree")
    parser.add_argument("--max-requests", type=int, help="the largest batch of the run, likewise")
    parser.add_argument("--start-only", action="store_true", help="stop when the first token is there")
    parser.add_argument("--cores", type=cores, help="processors to stay on, like 0-15")
    parser.add_argument("--wait", action="store_true", help="wait for a line on stdin between the imports and the first use of the device")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, asked.cores)
    return asked


def batch_points(asked: argparse.Namespace) -> list[Point]:
    return [Point(batch, asked.context) for batch in numbers(asked.sweep_batches)]


def context_points(asked: argparse.Namespace) -> list[Point]:
    """The light ones first: where time runs out, the heaviest are missing."""
    found = [Point(batch, context) for context in numbers(asked.sweep_contexts) for batch in numbers(asked.context_batches)]
    return sorted(found, key=lambda point: (point.batch * point.context, point.batch))


def prefills(point: Point, chunk: int) -> int:
    """Steps until all prompts are computed, `chunk` tokens in each; decodes of the early ones take a little of it."""
    return -(-point.batch * point.context // chunk) + 1


def sweep_tokens(asked: argparse.Namespace, point: Point, chunk: int) -> int:
    """Tokens that each request of a point generates: the early ones generate while the others' prompts are computed."""
    return max(int(asked.sweep_long), prefills(point, chunk) + 32)


def max_len(asked: argparse.Namespace, chunk: int = 8192) -> int:
    """Tokens of the longest request that an engine must take."""
    points = [Point(1, asked.context), *batch_points(asked), *context_points(asked)]
    needed = max(point.context + max(int(asked.long), sweep_tokens(asked, point, chunk)) for point in points)
    usual = min(DECODE_LEN, int(HF_CONFIGS[asked.model]["max_position_embeddings"]))
    return max(needed, int(asked.prefill) + 1, usual, int(getattr(asked, "max_len", None) or 0))


def max_requests(asked: argparse.Namespace) -> int:
    points = [*batch_points(asked), *context_points(asked)]
    return max(*numbers(asked.batches), *(point.batch for point in points), int(getattr(asked, "max_requests", None) or 1))


def shape_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The model's configuration, with as many positions as were asked for or are needed."""
    shape = HF_CONFIGS[asked.model]
    return {**shape, "max_position_embeddings": max(asked.positions or 0, shape["max_position_embeddings"], max_len(asked))}
