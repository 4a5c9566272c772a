"""Gemma-3: its configuration, and with the real weights the logits, tokens and text of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rung.attention import attention_layers
from rung.counters import Count
from rung.errors import ConfigError
from rung.models import Gemma3Config, Gemma3ForCausalLM, LoadedModel, load_model, random_model, read_config
from rung.models.build import config_from_transformers
from rung.models.weights.fuse import targets_of
from rung.runner import RunnerConfig, SamplingParams, build_engine
from tests.gemma3 import PROMPTS, gemma3_gguf, run_at_random, story, transformers_gemma3
from tests.models.harness import logits
from tests.smollm2 import divergences, reference_tokens

TOKENS = 8
NEAR_TIE = 1e-3


def values(**changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}
    return {"architectures": ["Gemma3ForCausalLM"], **sizes, **heads, **changes}


def test_five_layers_slide_and_the_sixth_does_not() -> None:
    config = config_from_transformers(values())
    assert config.layer_windows == (5, 5, 5, 5, 5, None, 5)
    assert config_from_transformers(values(sliding_window_pattern=2, num_hidden_layers=3)).layer_windows == (5, None, 5)
    kinds = ["full_attention", "sliding_attention"]
    assert config_from_transformers(values(layer_types=kinds, num_hidden_layers=2)).layer_windows == (None, 5)


def test_both_forms_of_the_rotary_bases_are_read() -> None:
    old = config_from_transformers(values(rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8}))
    new = {"full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8}, "sliding_attention": {"rope_theta": 2e4}}
    assert old == config_from_transformers(values(rope_parameters=new))
    assert isinstance(old, Gemma3Config)
    assert (old.rope_theta, old.local_rope_theta, old.rope_scaling is None) == (5e5, 2e4, False)


@pytest.mark.parametrize("bad", [{"hidden_activation": "relu"}, {"final_logit_softcapping": 30.0}, {"attention_bias": True}])
def test_what_is_not_supported_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        config_from_transformers(values(**bad))


def test_a_small_model_equals_transformers(tmp_path: Path) -> None:
    """Random weights, norms included, through the names of a checkpoint, in both kinds of layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**values(pad_token_id=0))).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3)
    theirs.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert isinstance(loaded.module, Gemma3ForCausalLM)
    assert read_config(tmp_path / "config.json") == loaded.config
    ids = torch.randint(64, (40,)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(loaded.module, ids, [7, 20, 13]), expected, rtol=0, atol=1e-3)


def test_every_parameter_has_a_source() -> None:
    module = random_model(config_from_transformers(values()))
    assert {target.parameter for target in targets_of(module.config).values()} == {name for name, _ in module.named_parameters()}
    assert [layer.spec.sliding_window for layer in attention_layers(module).values()] == [5, 5, 5, 5, 5, None, 5]


# --- the real weights ---


@pytest.fixture(scope="module")
def gemma3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma3_gguf(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> LoadedModel:
    return load_model(gemma3_path)


# What transformers' own reading of the vocabulary gives (`AutoTokenizer.from_pretrained(gguf_file=)`, 35 s).
KNOWN_IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Hello,  world!\n\n\ndef f": [2, 9259, 236764, 138, 12392, 236888, 109, 2063, 517],
    "  leading": [2, 138, 26016],
    "<b>html</b> <start_of_turn>user\nhi<end_of_turn>": [2, 200, 3185, 209, 236743, 105, 2364, 107, 2202, 106],
    "a\tb\r\nc": [2, 236746, 255968, 236763, 251, 107, 236755],
}


@pytest.mark.slow
def test_the_vocabulary_gives_the_known_ids(gemma3: LoadedModel) -> None:
    assert {text: gemma3.tokenizer.encode(text) for text in KNOWN_IDS} == KNOWN_IDS
    text = "Grüße aus München! 你好 🦊  x\n\n\n\ty"
    assert gemma3.tokenizer.decode(gemma3.tokenizer.encode(text)) == text


# What transformers generates with its own reading of the file (`from_pretrained(gguf_file=)`, 30 s), for the first prompts.
KNOWN_TOKENS = [
    (506, 5279, 529, 506, 2891, 529, 7001, 236761),
    (993, 11742, 496, 880, 7489, 3415, 236761, 1293),
    (140, 36208, 538, 1251, 236743, 236770, 236787, 107),
]


@pytest.mark.slow
def test_random_scheduling_with_preemption_equals_generate(gemma3: LoadedModel, gemma3_path: Path, record_property: Any) -> None:
    theirs = transformers_gemma3(gemma3_path)
    prompts = [gemma3.tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts += [story(gemma3.tokenizer, 508), story(gemma3.tokenizer, 560)]  # one outgrows the window of 512 while it decodes
    config = RunnerConfig(
        max_num_requests=8,
        max_num_tokens=64,
        max_model_len=592,
        num_blocks=38,
        long_prefill_chunk=48,
        graphs="full_and_piecewise",
        capture_sizes=(8, 64),
        lazy_capture=True,
    )
    engine, runner, start = build_engine(gemma3.module, config)
    assert runner.windows == (None, 512)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    tokens, preemptions = run_at_random(engine, prompts, params, seed=1)
    assert preemptions > 0
    assert runner.counters["step.full.best"] > 10
    assert runner.counters[Count.PREFIX_HIT_TOKENS] > 0
    assert start.compile is not None
    assert tokens[: len(KNOWN_TOKENS)] == KNOWN_TOKENS
    found = divergences(tokens, [reference_tokens(theirs, prompt, TOKENS) for prompt in prompts])
    record_property("divergences", [str(item) for item in found])
    assert [item for item in found if item.gap >= NEAR_TIE] == []
