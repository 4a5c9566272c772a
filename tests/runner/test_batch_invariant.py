"""Seeded sampling of a request: the same tokens and the same bits of log-probabilities alone and in a batch of 64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rung.errors import BackendUnavailableError, ConfigError
from rung.models import quantize_fp8, random_model
from rung.models.llama import LlamaForCausalLM
from rung.runner import Engine, RunnerConfig, SamplingParams, build_engine

PROMPT = [5, 6, 7, 8, 9, 3, 2]
TOKENS = 8


def engine(model: LlamaForCausalLM, **options: Any) -> Engine:
    config = RunnerConfig(
        max_num_requests=64, max_num_tokens=128, max_model_len=48, num_blocks=200, batch_invariant=True, **options
    )  # fmt: skip
    return build_engine(model, config)[0]


def answers(made: Engine, others: int, seed: int) -> list[Any]:
    """Of the same two requests, one greedy and one sampled, behind `others`, with filters and log-probabilities of their own."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(200) for _ in range(draw.randrange(1, 30))] for _ in range(others)]
    crowd = [
        SamplingParams(max_tokens=draw.randrange(1, 12), temperature=1.0, top_p=0.9, top_k=20, seed=i, ignore_eos=True, logprobs=3)
        for i in range(others)
    ]
    mine = [
        SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=11, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=TOKENS, temperature=0.7, top_p=0.8, seed=12, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2),
    ]
    place = others // 2
    found = made.generate([*prompts[:place], *[PROMPT] * len(mine), *prompts[place:]], [*crowd[:place], *mine, *crowd[place:]])
    return [(one.token_ids, one.logprobs) for one in found[place : place + len(mine)]]


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("kind", ["float32", "float16", "fp8"])
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(kind: str, graphs: str) -> None:
    model = random_model("tiny", dtype=torch.float16 if kind == "float16" else torch.float32)
    options: dict[str, Any] = {"graphs": graphs}
    if kind == "fp8":
        quantize_fp8(model)
        options["kv_cache_dtype"] = "fp8"
    if graphs != "none":
        options |= {"capture_sizes": (1, 8, 64, 128), "lazy_capture": True}
    made = engine(model, **options)
    alone = answers(made, 0, 0)
    assert [len(tokens) for tokens, _ in alone] == [TOKENS] * 3
    assert answers(made, 61, 1) == alone
    assert answers(made, 7, 2) == alone
    made.executor.shutdown()


def test_without_it_bits_are_not_promised_and_eager_steps_cannot() -> None:
    with pytest.raises(ConfigError, match="batch_invariant needs a compiled model"):
        RunnerConfig(batch_invariant=True, eager=True)
    with pytest.raises(BackendUnavailableError, match="FlashAttention"):
        engine(random_model("tiny"), attention_backend="flash_attn")
