"""Gemma-3 on CUDA: full and sliding groups in every mode, and with the real weights the tokens of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.counters import Count
from rung.models import Gemma3Config, LlamaForCausalLM, load_model, random_model
from rung.runner import RunnerConfig, SamplingParams, build_engine
from tests.gemma3 import PROMPTS, gemma3_gguf, run_at_random, story, transformers_gemma3
from tests.gpu.sync_debug import no_waiting
from tests.smollm2 import divergences, reference_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WINDOW = 64
SMALL = Gemma3Config(
    architecture="Gemma3ForCausalLM",
    vocab_size=997,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=1,
    head_size=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    qk_norm=True,
    query_pre_attn_scalar=64,
    layer_windows=(WINDOW, WINDOW, None, WINDOW),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def small_model() -> LlamaForCausalLM:
    """Random weights, large enough for tokens to depend on what is attended to."""
    module = random_model(SMALL, device="cuda")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(5)
    return module


def prompts() -> list[list[int]]:
    """Short and long ones, some with the same beginning."""
    chance = random.Random(0)
    trunk = [chance.randrange(SMALL.vocab_size) for _ in range(150)]
    return [
        trunk[: chance.choice((0, 40, 150))] + [chance.randrange(SMALL.vocab_size) for _ in range(chance.randint(1, 90))] for _ in range(24)
    ]


def run(**changes: Any) -> tuple[list[tuple[int, ...]], int, dict[str, int]]:
    sizes = {"max_num_requests": 16, "max_num_tokens": 128, "max_model_len": 320, "long_prefill_chunk": 48, "num_blocks": 400}
    engine, runner, _ = build_engine(small_model(), RunnerConfig(**{**sizes, **changes}))
    assert runner.windows == (None, WINDOW)
    tokens, preemptions = run_at_random(engine, prompts(), GREEDY, seed=2)
    pools = engine.scheduler.blocks.pools
    assert [pool.num_free for pool in pools] == [pool.num_blocks - 1 for pool in pools]
    return tokens, preemptions, runner.counters.snapshot()


@pytest.mark.parametrize("replay_steps", [1, 4])
@pytest.mark.parametrize("graphs", ["piecewise", "full", "full_and_piecewise"])
def test_every_mode_with_preemption_and_prefixes_gives_the_eager_tokens(graphs: str, replay_steps: int) -> None:
    wanted, none, _ = run(graphs="none", eager=True, prefix_cache=False)
    tokens, preemptions, counts = run(graphs=graphs, replay_steps=replay_steps, num_blocks=60)
    print(graphs, preemptions, {name: count for name, count in counts.items() if name.startswith(("step.", "prefix"))})
    assert (none, preemptions > 0, counts[Count.PREFIX_HIT_TOKENS] > 0) == (0, True, True)
    different = [index for index, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]]
    assert different == []


def test_steps_with_two_tables_wait_for_nothing() -> None:
    config = RunnerConfig(
        max_num_requests=8, max_num_tokens=128, max_model_len=320, num_blocks=100, graphs="full_and_piecewise", steps_in_flight=1
    )
    engine, runner, _ = build_engine(small_model(), config)
    for prompt in prompts()[:4]:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    for _ in range(8):
        engine.step()
    for _ in range(40):  # rows grow and lose their fronts meanwhile
        plan = engine.scheduler.schedule()
        with no_waiting():
            assert runner.execute_model(plan) is None
            output = runner.sample_tokens()
        assert output is not None
        engine.scheduler.update(output.get_output())


def test_real_weights_in_fp32_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    path = gemma3_gguf(tmp_path)
    loaded = load_model(path, device="cuda")
    ids = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS]
    ids += [story(loaded.tokenizer, 508), story(loaded.tokenizer, 560)]
    config = RunnerConfig(
        max_num_requests=8, max_num_tokens=64, max_model_len=592, num_blocks=38, long_prefill_chunk=48, graphs="full_and_piecewise"
    )
    engine, _, start = build_engine(loaded.module, config)
    tokens, preemptions = run_at_random(engine, ids, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), seed=1)
    assert preemptions > 0
    theirs = transformers_gemma3(path)
    found = divergences(tokens, [reference_tokens(theirs, prompt, 16) for prompt in ids])
    print(start.attention, "divergences", found)
    assert [item for item in found if item.gap >= 1e-3] == []
