"""How a step's time moves during one long decode: with the context, and with the device's clock."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.device_state import DeviceState, StateReader
from rung.runner import Engine, SamplingParams


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive steps of a decode."""

    tokens: int  # behind the first request when the span begins
    step_ms: float  # median
    worst_ms: float
    state: DeviceState | None  # in the middle of the span


def decode_series(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, spans: int, reader: StateReader) -> list[Span]:
    """One generation of `tokens` for all prompts, cut into spans of equal length. A step is the time from one token of the first request
    to its next one (a group's time over its tokens, where tokens come in groups), seen by the host. It counts from where the last request
    has its first token, so prefills stay out."""
    first_tokens: set[int] = set()
    stamps: list[tuple[float, int]] = []  # (when, tokens of the first request until then)
    states: dict[int, DeviceState | None] = {}
    read_at = {round((2 * span + 1) * tokens / (2 * spans)) for span in range(spans)}
    count = 0
    for index, update in engine.stream(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True)):
        first_tokens.add(index)
        if index == 0 and update.token_ids:
            before, count = count, count + len(update.token_ids)
            if len(first_tokens) == len(prompts):
                stamps.append((time.perf_counter(), count))
            if due := [at for at in read_at if before < at <= count]:
                states[due[0]] = reader.read()
    return cut(stamps, len(prompts[0]), spans, states)


def cut(stamps: Sequence[tuple[float, int]], context: int, spans: int, states: dict[int, DeviceState | None]) -> list[Span]:
    """Spans of the steps between `stamps`; each has the reading that was taken in it, if one was."""
    steps = [(start[1], (end[0] - start[0]) / (end[1] - start[1]) * 1e3) for start, end in itertools.pairwise(stamps)]
    bounds = [round(len(steps) * at / spans) for at in range(spans + 1)]
    found = []
    for first, last in itertools.pairwise(bounds):
        if mine := [ms for _, ms in steps[first:last]]:
            begin, end = steps[first][0], steps[last - 1][0]
            state = next((state for at, state in states.items() if begin <= at <= end + 1), None)
            found.append(Span(context + begin, statistics.median(mine), max(mine), state))
    return found


def print_series(title: str, spans: Sequence[Span]) -> None:
    """A line for each span."""
    print(f"{title}: tokens behind the first, ms a step (median, worst), device")
    for span in spans:
        print(f"{span.tokens:>8} {span.step_ms:9.3f} {span.worst_ms:9.3f}   {span.state or '-'}")
