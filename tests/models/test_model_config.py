"""LlamaConfig: what it reads from config.json, and what it refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from rung.errors import ConfigError, ModelLoadError, UnknownModelError
from rung.models import ARCHITECTURES, SHAPES, LlamaConfig, read_config
from rung.models.rope import LinearScaling, Llama3Scaling

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def values(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def test_head_size_defaults_to_hidden_size_over_heads() -> None:
    assert LlamaConfig.from_transformers(values()).head_size == 16


def test_head_dim_wins_over_the_quotient() -> None:
    assert LlamaConfig.from_transformers(values(head_dim=32)).query_size == 128


def test_key_value_heads_default_to_heads() -> None:
    assert LlamaConfig.from_transformers(values(num_key_value_heads=None)).num_kv_heads == 4


def test_model_type_names_the_architecture_when_architectures_is_absent() -> None:
    assert LlamaConfig.from_transformers(values(architectures=None, model_type="qwen3")).qk_norm


def test_qwen2_has_bias_on_query_key_value_alone() -> None:
    config = LlamaConfig.from_transformers(values(architectures=["Qwen2ForCausalLM"]))
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_attention_bias_covers_all_four_projections() -> None:
    config = LlamaConfig.from_transformers(values(attention_bias=True))
    assert (config.qkv_bias, config.output_bias) == (True, True)


def test_rope_of_version_4() -> None:
    config = LlamaConfig.from_transformers(values(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3Scaling(**LLAMA3)


def test_rope_of_version_5() -> None:
    config = LlamaConfig.from_transformers(values(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}))
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3Scaling(**LLAMA3))


def test_rope_type_under_its_oldest_name() -> None:
    config = LlamaConfig.from_transformers(values(rope_scaling={"type": "linear", "factor": 2}))
    assert config.rope_scaling == LinearScaling(factor=2.0)


def test_mistral_window_holds_for_every_layer() -> None:
    config = LlamaConfig.from_transformers(values(architectures=["MistralForCausalLM"], sliding_window=32))
    assert [config.window(layer) for layer in range(2)] == [32, 32]


def test_qwen_window_is_off_unless_asked_for() -> None:
    config = LlamaConfig.from_transformers(values(architectures=["Qwen2ForCausalLM"], sliding_window=32, use_sliding_window=False))
    assert config.window(0) is None


def test_qwen_layer_types_decide_each_window() -> None:
    kinds = ["full_attention", "sliding_attention"]
    changes = {"sliding_window": 32, "use_sliding_window": True, "layer_types": kinds}
    config = LlamaConfig.from_transformers(values(architectures=["Qwen3ForCausalLM"], **changes))
    assert [config.window(layer) for layer in range(2)] == [None, 32]


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnknownModelError, match="GPT2LMHeadModel") as caught:
        LlamaConfig.from_transformers(values(architectures=["GPT2LMHeadModel"]))
    assert all(name in caught.value.message for name in ARCHITECTURES)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "even"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
    ],
)
def test_refused_with_a_hint(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LlamaConfig.from_transformers(values(**changes))
    assert caught.value.hint


def test_damaged_json_is_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path / "config.json")


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SHAPES["tiny"].num_layers = 4  # type: ignore[misc]


def test_windows_must_have_one_entry_a_layer() -> None:
    with pytest.raises(ConfigError, match="one entry a layer"):
        replace(SHAPES["tiny"], layer_windows=(8,))
