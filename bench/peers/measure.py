"""What every peer measures in the same way, in a process of its own. Rows are written as they come, so that a time limit costs the rest."""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.shapes import HF_CONFIGS, prefill_operations

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]  # so many tokens for each prompt, greedy, past any end token, ids on the host


class Report:
    """Rows of one peer, in a file that is whole after each row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, **values: Any) -> None:
        self.rows.append({"kind": kind, **values})
        self.path.write_text(json.dumps(self.rows))
        print(kind, values, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add("phase", name=name, seconds=time.perf_counter() - start)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """A failure becomes a row, and what follows is still measured."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add("failure", what=what, error=f"{type(error).__name__}: {error}"[:400])


def options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(HF_CONFIGS), default="8b")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--contexts", default="128", help="prompt tokens of the decode steps")
    parser.add_argument("--prefill", type=int, default=8191, help="tokens of the one prompt that is prefilled; 0: none")
    parser.add_argument("--positions", type=int, help="positions of the model, where its own are too few")
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start-only", action="store_true", help="stop when the first token is there")
    parser.add_argument("--memory", type=float, default=0.7, help="part of the device's memory that vLLM may take")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def shape_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The model's configuration, with the positions that were asked for."""
    shape = HF_CONFIGS[asked.model]
    return {**shape, "max_position_embeddings": asked.positions or shape["max_position_embeddings"]}


def max_model_len(asked: argparse.Namespace) -> int:
    """Tokens of the longest request."""
    longest = max(asked.prefill + 1, max(numbers(asked.contexts)) + asked.long)
    return min(int(shape_of(asked)["max_position_embeddings"]), longest)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def prompts(count: int, length: int, model: str, draw: int = 0) -> Prompts:
    """The same ones for every peer."""
    rng = random.Random(f"{count} {length} {draw}")
    vocab = HF_CONFIGS[model]["vocab_size"]
    return [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(count)]


def steps(report: Report, generate: Generate, asked: argparse.Namespace, *, profiled: bool = True) -> None:
    """A row for each batch size and context: ms a decode step from the difference between a long and a short generation, and the time of
    the kernels in it."""
    for context in numbers(asked.contexts):
        for batch in numbers(asked.batches):
            with report.guarded(f"steps of {batch} at {context}"):
                report.add("step", **step(generate, asked, batch, context, profiled=profiled))


def step(generate: Generate, asked: argparse.Namespace, batch: int, context: int, *, profiled: bool) -> dict[str, Any]:
    def seconds(tokens: int, draw: int) -> float:
        some = prompts(batch, context, asked.model, draw)
        start = time.perf_counter()
        generate(some, tokens)
        return time.perf_counter() - start

    seconds(asked.short, 0)
    found = []
    for draw in range(asked.rounds):
        first = seconds(asked.short, 2 * draw + 1)
        found.append((seconds(asked.long, 2 * draw + 2) - first) / (asked.long - asked.short) * 1e3)
    row: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "wall_ms": statistics.median(found),
        "min_ms": min(found),
        "max_ms": max(found),
    }
    if profiled and on_gpu():
        few = asked.short + 16
        busy = [kernel_ms(lambda tokens=tokens: seconds(tokens, 9)) for tokens in (asked.short, few)]  # type: ignore[misc]
        row["device_ms"] = (busy[1][0] - busy[0][0]) / (few - asked.short)
        row["kernels"] = (busy[1][1] - busy[0][1]) / (few - asked.short)
    return row


def kernel_ms(call: Callable[[], object]) -> tuple[float, int]:
    """Sum of the times of all kernels of a call, those of replayed graphs included, and how many they are."""
    import torch
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in recorded.events() or [] if event.device_type == DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in kernels) * 1e-3, len(kernels)


def prefill(report: Report, generate: Generate, asked: argparse.Namespace, tokens: int) -> None:
    """A row: seconds until the first token of one prompt."""
    with report.guarded(f"prefill of {tokens}"):
        generate(prompts(1, tokens, asked.model), 1)
        found = []
        for draw in range(asked.rounds):
            some = prompts(1, tokens, asked.model, draw + 1)
            start = time.perf_counter()
            generate(some, 1)
            found.append(time.perf_counter() - start)
        report.add("prefill", tokens=tokens, **prefill_row(asked.model, tokens, found))


def prefill_row(model: str, tokens: int, seconds: Sequence[float]) -> dict[str, float]:
    median = statistics.median(seconds)
    return {"ms": median * 1e3, "max_ms": max(seconds) * 1e3, "tflops": prefill_operations(model, tokens) / median * 1e-12}


def memory(report: Report, name: str) -> None:
    """What the device has in use, the processes beside this one included."""
    if on_gpu():
        import torch

        gc.collect()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        report.add("memory", name=name, device_bytes=total - free, peak_bytes=peak, reserved_bytes=reserved)


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
