"""The two model shapes that all peers run, as the configuration of a Llama in transformers' words. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

# our names of them; "tiny" is for trying the scripts on a CPU
TARGETS = {"8b": "llama-8b", "8b-fp8": "llama-8b", "135m": "smollm2-135m", "tiny": "tiny"}
FP8 = ("8b-fp8",)  # with e4m3 weights and KV cache, which we alone run

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        **_COMMON,
        "rope_theta": 500000.0,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "135m": {
        **_COMMON,
        "rope_theta": 100000.0,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **_COMMON,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    },
}
HF_CONFIGS["8b-fp8"] = HF_CONFIGS["8b"]


def prefill_operations(model: str, tokens: int) -> float:
    """Floating-point operations of one prompt: the layers' products, causal attention, and the head of the last token."""
    shape = HF_CONFIGS[model]
    hidden, head, layers = shape["hidden_size"], shape["head_dim"], shape["num_hidden_layers"]
    query, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    weights = hidden * (query + 2 * keys) + query * hidden + 3 * hidden * shape["intermediate_size"]
    return float(layers * (2 * tokens * weights + 2 * query * tokens * (tokens + 1)) + 2 * hidden * shape["vocab_size"])
