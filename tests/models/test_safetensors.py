"""Folders that transformers saved give transformers' logits; incomplete ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.errors import MissingWeightError, ModelLoadError, TokenizerError, UnexpectedWeightError, UnknownModelError
from rung.models import load_model
from tests.models.harness import logits

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79]
SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough that a wrong weight shows
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 5, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def save(folder: Path, kind: str, **options: Any) -> Any:
    family, changes = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **changes, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # transformers starts these at 0 and 1
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder, **options)
    return model


def edit(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    change(tensors)
    safetensors_torch.save_file(tensors, path)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    theirs = save(tmp_path, kind)
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(load_model(tmp_path).module, IDS), expected, rtol=0, atol=1e-4)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    save(tmp_path / "one", "llama")
    save(tmp_path / "many", "llama", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (load_model(tmp_path / name).module.state_dict() for name in ("one", "many"))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_dtype_is_converted_while_loading(tmp_path: Path) -> None:
    theirs = save(tmp_path, "llama")
    ours = load_model(tmp_path, dtype=torch.bfloat16).module
    assert torch.equal(ours.embed_tokens.weight, theirs.model.embed_tokens.weight.to(torch.bfloat16))


def test_rotary_buffers_of_old_exports_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load_model(tmp_path).config.num_layers == 3


def test_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(MissingWeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        load_model(tmp_path)
    assert str(tmp_path / "model.safetensors") in caught.value.message
    assert caught.value.hint


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(MissingWeightError, match=r"model\.norm\.weight.*\[64\], got \[3\]"):
        load_model(tmp_path)


def test_unexpected_tensor_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(UnexpectedWeightError, match="q_norm"):
        load_model(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path, "llama", max_shard_size="100KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(MissingWeightError, match=shard.name):
        load_model(tmp_path)


def test_index_may_not_leave_the_folder(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../y.safetensors"}}))
    with pytest.raises(ModelLoadError, match="outside"):
        load_model(tmp_path)


def test_damaged_file_is_a_load_error(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_model(tmp_path)


def test_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnknownModelError, match="safetensors"):
        load_model(tmp_path)


def test_tokenizer_is_asked_for_only_when_used(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    loaded = load_model(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        _ = loaded.tokenizer


def test_stop_ids_come_from_the_generation_configuration(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "temperature": 0.6}))
    assert load_model(tmp_path).generation == {"eos_token_id": [5, 7], "temperature": 0.6}
