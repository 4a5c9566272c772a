"""A two-layer decoder with random weights, a plain paged attention, and the same model without any cache as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from rung.attention import (
    Attention,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    CaptureSupport,
    KVCache,
)
from rung.runner import Engine, InProcessExecutor, ModelRunner, RunnerConfig, Scheduler

VOCAB = 97
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
HIDDEN = HEADS * HEAD_SIZE


class PlainAttention(AttentionBackend):
    """One request after the other."""

    name: ClassVar[str] = "plain"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.NEVER

    @classmethod
    def why_not(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        return None

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        real = slot_mapping >= 0
        cache.key.flatten(0, 1)[slot_mapping[real]] = key[real]
        cache.value.flatten(0, 1)[slot_mapping[real]] = value[real]

    def forward(self, query: torch.Tensor, cache: KVCache, out: torch.Tensor, metadata: AttentionMetadata) -> None:
        out.zero_()
        starts = metadata.query_start_loc.tolist()
        for i, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            slots = [int(metadata.block_table[i, p // cache.block_size]) * cache.block_size + p % cache.block_size for p in range(length)]
            out[rows] = dense_attention(query[rows], cache.key.flatten(0, 1)[slots], cache.value.flatten(0, 1)[slots])


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """query [rows, heads, size] are the last rows of key and value [length, kv_heads, size]."""
    length, rows = key.shape[0], query.shape[0]
    mask = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(length - rows)
    if window is not None:
        mask = mask.triu(length - rows - window + 1)
    result = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=mask, enable_gqa=True
    )
    return result[0].transpose(0, 1)


class TinyLayer(nn.Module):
    def __init__(self, index: int, window: int | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, HIDDEN))
        spec = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5, sliding_window=window)
        self.attention = Attention(f"layers.{index}.attention", spec)

    def forward(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        qkv = self.qkv(F.layer_norm(x, (HIDDEN,)))
        q, k, v = qkv.unflatten(-1, (-1, HEAD_SIZE)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + self.out(attend(q, k, v).flatten(1))
        return x + self.mlp(F.layer_norm(x, (HIDDEN,)))


class TinyModel(nn.Module):
    def __init__(self, seed: int = 0, max_len: int = 256, windows: Sequence[int | None] = (None, None)) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.places = nn.Embedding(max_len, HIDDEN)
        self.layers = nn.ModuleList(TinyLayer(i, window) for i, window in enumerate(windows))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.calls: list[int] = []  # rows of each forward
        self.projected: list[int] = []  # rows of each head projection

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids.shape[0])
        x = self.tokens(input_ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, layer.attention)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.projected.append(hidden.shape[0])
        logits: torch.Tensor = self.head(hidden)
        return logits

    @torch.no_grad()
    def without_cache(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [vocab] after `ids`, every token computed anew."""
        tokens = torch.tensor(ids)
        x = self.tokens(tokens) + self.places(torch.arange(len(ids)))
        for layer in self.layers:
            x = layer(x, partial(dense_attention, window=layer.attention.spec.sliding_window))
        logits: torch.Tensor = self.head(x[-1])
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.without_cache(ids).argmax()))
        return ids[len(prompt) :]


def make_runner(model: TinyModel | None = None, *, backend: type[AttentionBackend] = PlainAttention, **config: Any) -> ModelRunner:
    values: dict[str, Any] = {"max_num_requests": 8, "max_num_tokens": 64, "max_model_len": 128, "num_blocks": 65, "block_size": 16}
    return ModelRunner(model or TinyModel(), RunnerConfig(**{**values, **config}), backend=backend, vocab_size=VOCAB)


def make_engine(model: TinyModel | None = None, tokenizer: Any = None, **config: Any) -> tuple[Engine, ModelRunner]:
    runner = make_runner(model, **config)
    scheduler = Scheduler(runner.config, runner.num_blocks, runner.windows)
    return Engine(InProcessExecutor(runner), scheduler, vocab_size=VOCAB, tokenizer=tokenizer), runner


class LetterTokenizer:
    """Token i is one letter; `stop_ids` are hidden from the text."""

    def __init__(self, stop_ids: Sequence[int] = ()) -> None:
        self.stop_ids = frozenset(stop_ids)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def detokenizer(self) -> LetterDetokenizer:
        return LetterDetokenizer()


class LetterDetokenizer:
    def add(self, ids: Sequence[int]) -> str:
        return "".join(chr(token + 32) for token in ids)

    def finish(self) -> str:
        return ""
