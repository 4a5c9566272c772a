"""The quick start model: weights, configuration and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rung.errors import MissingWeightError, ModelLoadError, UnexpectedWeightError, UnknownModelError
from rung.models import SHAPES, LoadedModel, load_model
from rung.models.weights.gguf import unpermute
from tests.models.harness import logits

gguf = pytest.importorskip("gguf")

PROMPTS = ["Hello", "The capital of France is", "def fibonacci(n):\n    if n < 2:\n        return n\n", "Grüße aus München! 你好 " * 8]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_equal_transformers(prompt: str, smollm2: LoadedModel, their_smollm2: Any) -> None:
    ids = smollm2.tokenizer.encode(prompt)
    with torch.inference_mode():
        expected = their_smollm2(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(smollm2.module, ids), expected, rtol=0, atol=1e-3)


def test_configuration_is_the_known_shape(smollm2: LoadedModel) -> None:
    shape = SHAPES["smollm2-135m"]
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "rope_theta", "tie_word_embeddings"):
        assert getattr(smollm2.config, name) == getattr(shape, name)


def test_end_of_turn_stops_a_generation(smollm2: LoadedModel) -> None:
    assert smollm2.generation["eos_token_id"] == [2]
    assert smollm2.tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_unpermute_undoes_the_row_order_of_llama_files() -> None:
    rows = torch.arange(2 * 6)  # two heads of six
    stored = torch.tensor([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])  # (i, i + 3) become neighbours
    assert torch.equal(unpermute(stored, 2), rows)


def write(path: Path, *, architecture: str = "llama", drop: str = "", extra: str = "", values: dict[str, Any] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["a", "b", "ab", "<s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    for key, value in (values or {}).items():
        writer.add_string(key, value)
    shapes = {"token_embd": (4, 8), "output": (4, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {"blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8)}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    shapes |= {extra: (8,)} if extra else {}
    for name, shape in shapes.items():
        if name != drop:
            writer.add_tensor(f"{name}.weight", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_separate_head_unties_the_embedding(tmp_path: Path) -> None:
    assert load_model(write(tmp_path / "m.gguf")).module.lm_head is not None


def test_absent_head_ties_the_embedding(tmp_path: Path) -> None:
    assert load_model(write(tmp_path / "m.gguf", drop="output")).config.tie_word_embeddings


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    assert load_model(write(tmp_path / "m.gguf").parent).path == tmp_path / "m.gguf"


def test_two_files_in_a_folder_need_a_choice(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf")
    with pytest.raises(UnknownModelError, match="2 GGUF files"):
        load_model(tmp_path)


def test_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", drop="blk.0.ffn_up")
    with pytest.raises(MissingWeightError, match=r"layers\.0\.mlp\.up_proj") as caught:
        load_model(path)
    assert str(path) in caught.value.message


def test_unexpected_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnexpectedWeightError, match=r"blk\.0\.ssm_a"):
        load_model(write(tmp_path / "m.gguf", extra="blk.0.ssm_a"))


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"mamba.*llama, qwen2, qwen3"):
        load_model(write(tmp_path / "m.gguf", architecture="mamba"))


@pytest.mark.parametrize("keep", [3, 20, 200, 700, -40])
def test_cut_file_is_a_load_error(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"m\.gguf") as caught:
        load_model(path)
    assert caught.value.hint


def test_other_file_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model at all" * 4)
    with pytest.raises(ModelLoadError, match="no GGUF file"):
        load_model(tmp_path / "m.gguf")
