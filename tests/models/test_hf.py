"""Unmodified transformers models over the flat batch, against their own eager output. Pieces run as FX graphs: nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.attention import SPLIT_OPS, attention_layers
from rung.compile.guards import Roots
from rung.compile.trace import trace
from rung.context import set_forward_context
from rung.errors import UnsupportedModuleError
from rung.models.hf import FlatModel
from tests.compile.cases import assert_same, bound, uncompiled
from tests.models.harness import bind_dense, context

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=16, query_pre_attn_scalar=16, **WINDOWS),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "phi": lambda: transformers.PhiConfig(**{**SMALL, "num_key_value_heads": 4}),
}
LENGTH, CHUNKS = 11, (6, 1, 4)


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> tuple[FlatModel, torch.Tensor, torch.Tensor, list[str]]:
    """The flat model, token ids, the logits of the unmodified model, and its names of parameters."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param](), attn_implementation="eager").eval()
    ids = torch.randint(3, 64, (LENGTH,))
    with torch.no_grad():
        logits = theirs(input_ids=ids[None], use_cache=False).logits[0]
    names = list(theirs.state_dict())
    return FlatModel(theirs.requires_grad_(False)), ids, logits, names


def test_traces_whole_and_equals_its_own_eager_output(model: Any) -> None:
    flat, ids, expected, names = model
    assert list(flat.model.state_dict()) == names
    bind_dense(flat, LENGTH)
    dynamic = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
    compiled, graph = uncompiled(flat.forward, ids[:3], torch.arange(3), dynamic=dynamic, split_ops=SPLIT_OPS)
    assert [step.piece is None for step in graph.steps] == [False, True, False, True, False]  # one break a layer
    assert compiled.input_names == ("input_ids", "positions")
    for run in (flat, compiled):
        rows, start = [], 0
        for count in CHUNKS:
            with torch.no_grad(), set_forward_context(context(flat, start, count)):
                rows.append(flat.compute_logits(run(ids[start : start + count], torch.arange(start, start + count))))
            start += count
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-5)


def test_layers_ask_for_what_the_model_asks_for(model: Any) -> None:
    flat = model[0]
    windows = [layer.spec.sliding_window for layer in attention_layers(flat).values()]
    assert windows == {"Mistral": [4, 4], "Gemma3": [4, None]}.get(
        type(flat.base).__name__.removesuffix("Model").removesuffix("Text"), [None] * 2
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_model_itself_traces_under_its_decorators(name: str) -> None:
    """Their forwards take `*args, **kwargs`; sizes, structure of the output and guards are those of the plain call."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval().requires_grad_(False)
    ids = torch.randint(3, 64, (2, LENGTH))
    dynamic = {"input_ids": {1: "tokens"}}
    with torch.no_grad():
        compiled, _ = uncompiled(model.forward, dynamic=dynamic, input_ids=ids[:, :4], use_cache=False)
        assert compiled.input_names == ("kwargs.input_ids",)
        assert_same(compiled(ids), model(ids, use_cache=False))
        guards = trace(model.forward, bound(model.forward, (ids,), {"use_cache": False}), {}).guards
        assert guards.violation(Roots(model.forward)) == ""
    assert guards.unknown == ()
    assert "is_grad_enabled" in guards.violation(Roots(model.forward))  # transformers asks for the gradient mode


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModuleError, match="does not go through"):
        FlatModel(transformers.BloomForCausalLM(config))
