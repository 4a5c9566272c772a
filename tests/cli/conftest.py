"""A whole model folder of a few kilobytes, and the program without a process of its own."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from rung.cli.app import program

HIDDEN, HEADS, MLP, LAYERS, CONTEXT = 32, 2, 48, 2, 256
CHARACTERS = string.ascii_letters + string.digits + " .,?!"
VOCAB = len(CHARACTERS) + 1


@pytest.fixture
def rung() -> Callable[..., Result]:
    """Run the program with the given arguments; an exception that leaves it is raised."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(program, [str(argument) for argument in arguments], prog_name="rung", catch_exceptions=False)

    return run


def refused(result: Result) -> str:
    """The error stream of a run that ended with an error and a hint, and nothing else on any stream."""
    lines = result.stderr.splitlines()
    assert result.exit_code == 2, result.output
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert result.stdout == ""
    return result.stderr


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A Llama with random weights; its tokens are single characters."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(shape, generator=generator) * 0.2 for name, shape in _shapes().items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": VOCAB - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        for name in ("k_proj", "v_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (HIDDEN // HEADS, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}mlp.{name}.weight"] = (MLP, HIDDEN)
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, MLP)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (HIDDEN,)
    return shapes


def _write_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {character: index for index, character in enumerate(CHARACTERS)} | {"</s>": VOCAB - 1}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
