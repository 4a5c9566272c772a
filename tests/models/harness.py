"""One request on a dense attention, and the same weights in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from rung.attention import AttentionBackend, AttentionMetadata, AttentionSpec, CaptureSupport, KVCache, attention_layers
from rung.context import ForwardContext, set_forward_context
from rung.models import LlamaForCausalLM


class DenseAttention(AttentionBackend):
    """Plain causal attention for one request whose cache is one long block."""

    name = "dense-test"
    capture_support = CaptureSupport.NEVER

    @classmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        return None

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        cache.key[0, slot_mapping] = key
        cache.value[0, slot_mapping] = value

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        length, first = metadata.max_seq_len, metadata.max_seq_len - query.shape[0]
        distance = torch.arange(first, length)[:, None] - torch.arange(length)[None]  # [queries, keys]
        mask = distance >= 0
        if self.spec.sliding_window is not None:
            mask &= distance < self.spec.sliding_window
        heads = self.spec.num_heads // self.spec.num_kv_heads
        key, value = (x[0, :length].repeat_interleave(heads, dim=1).transpose(0, 1) for x in (cache.key, cache.value))
        out.copy_(F.scaled_dot_product_attention(query.transpose(0, 1), key, value, mask, scale=self.spec.scale).transpose(0, 1))


def bind_dense(module: LlamaForCausalLM, length: int) -> None:
    dtype = next(module.parameters()).dtype
    for layer in attention_layers(module).values():
        shape = (1, length, layer.spec.num_kv_heads, layer.spec.head_size)
        layer.bind(DenseAttention(layer.spec), KVCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)))


def context(module: LlamaForCausalLM, start: int, count: int) -> ForwardContext:
    """Rows start .. start + count of the one request."""
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([start + count], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(start, start + count),
        num_requests=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=start + count,
    )
    layers = attention_layers(module)
    return ForwardContext(attention_layers=layers, attention_metadata=dict.fromkeys(layers, metadata), num_actual_tokens=count)


def logits(module: LlamaForCausalLM, ids: list[int], chunks: list[int] | None = None) -> torch.Tensor:
    """[len(ids), vocab_size], computed in chunks of the given sizes."""
    bind_dense(module, len(ids))
    rows, start = [], 0
    for count in chunks or [len(ids)]:
        with torch.inference_mode(), set_forward_context(context(module, start, count)):
            hidden = module(torch.tensor(ids[start : start + count], dtype=torch.int64), torch.arange(start, start + count))
            rows.append(module.compute_logits(hidden))
        start += count
    return torch.cat(rows)


def transformers_gguf(path: Path) -> Any:
    """transformers' own reading of a GGUF file: its configuration, its names, its row order, its dequantisation.

    `from_pretrained(gguf_file=)` takes 35 s here, nearly all of it for the vocabulary, and wants accelerate; so the vocabulary is left
    out and its loader is called directly."""
    import gguf
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM as TheirModel
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    reader = gguf.GGUFReader(path)
    for key in ("tokens", "token_type", "merges"):
        del reader.fields[f"tokenizer.ggml.{key}"]
    with patch.object(gguf, "GGUFReader", lambda _: reader):
        config = TheirConfig.from_dict(load_gguf_checkpoint(str(path))["config"])
        with torch.device("meta"):
            model = TheirModel(config)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False, assign=True)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights
    return model.float().eval().requires_grad_(False)
