"""Scales of e4m3 keys, values and activations, from what a model makes of some prompts.

A scale is the largest magnitude that was seen, times a margin, divided by 448, the largest number of e4m3: what is stored is the value
divided by the scale, so it fills the range, and what exceeds it later is clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rung.attention import Attention, AttentionMetadata, AttentionSpec, KVCache, attention_layers
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.base import HostMetadata
from rung.context import ForwardContext, set_forward_context
from rung.errors import ConfigError
from rung.passes.ir.fp8 import LARGEST, TINY


class _Watching(TorchReference):
    """Notes the largest magnitude of each write, keys as they go into the cache: normed and rotated."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.largest_key = self.largest_value = 0.0

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        self.largest_key = _larger(self.largest_key, key)
        self.largest_value = _larger(self.largest_value, value)
        super().write_kv(key, value, cache, slot_mapping)


def calibrate_kv_scales(model: nn.Module, prompts: Iterable[Sequence[int]], *, margin: float = 1.0) -> dict[str, tuple[float, float]]:
    """Set `key_scale` and `value_scale` of every attention layer of `model` for an e4m3 cache, and return both by layer.

    `model(input_ids, positions)` is run eagerly on each prompt (token ids), in its own dtype and on its device, without a cache that lasts.
    Call it before a runner is built, which hands the scales to its cache. `margin` is the room above the largest value seen: 2.0 doubles
    the scales. Raises `ConfigError` for no prompts, and for values that are not finite."""
    watching = {name: _Watching(layer.spec) for name, layer in attention_layers(model).items()}
    _run(model, prompts, watching)
    scales: dict[str, tuple[float, float]] = {}
    for name, layer in attention_layers(model).items():
        seen = watching[name]
        layer.key_scale = _scale(f"{name}: keys", seen.largest_key, margin)
        layer.value_scale = _scale(f"{name}: values", seen.largest_value, margin)
        scales[name] = layer.key_scale, layer.value_scale
    return scales


def calibrate_input_scales(model: nn.Module, prompts: Iterable[Sequence[int]], *, margin: float = 1.0) -> dict[str, float]:
    """The `input_scales` that `quantize_fp8` takes for static activations, by name of each linear layer that the prompts reached.

    As `calibrate_kv_scales`, before the model is quantised; nothing of it changes."""
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            largest[name] = _larger(largest.get(name, 0.0), args[0])

        return before

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    try:
        _run(model, prompts, {name: TorchReference(layer.spec) for name, layer in attention_layers(model).items()})
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _scale(name, value, margin) for name, value in largest.items()}


def _larger(so_far: float, values: torch.Tensor) -> float:
    """The larger of both, NaN if one is."""
    found = float(values.abs().max())
    return so_far if found <= so_far or so_far != so_far else found


def _scale(what: str, largest: float, margin: float) -> float:
    if not largest < float("inf"):
        raise ConfigError(f"{what} reach {largest} on the prompts", hint="calibrate in float32 or bfloat16, on prompts it can read")
    return max(largest, TINY) * margin / LARGEST


@torch.no_grad()
def _run(model: nn.Module, prompts: Iterable[Sequence[int]], backends: dict[str, Any]) -> None:
    """One forward pass for each prompt."""
    count, first = 0, next(model.parameters())
    for prompt in prompts:
        ids = torch.tensor(list(prompt), dtype=torch.int32, device=first.device)
        with _bound(model, backends, len(ids), first) as layers, set_forward_context(prompt_context(layers, len(ids), first.device)):
            model(ids, torch.arange(len(ids), device=first.device))
        count += 1
    if not count:
        raise ConfigError("there are no prompts to calibrate on", hint="give a few that are like those to come, as token ids")


@contextmanager
def _bound(model: nn.Module, backends: dict[str, Any], length: int, like: torch.Tensor) -> Iterator[dict[str, Attention]]:
    """The layers with these backends, and a cache for one request of `length` tokens; what was bound before is bound again behind it."""
    layers = attention_layers(model)
    before = {name: (layer.backend, layer.kv_cache, layer.why_not_fp8_output) for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            shape = (1, length, layer.spec.num_kv_heads, layer.spec.head_size)
            keys, values = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))
            layer.bind(backends[name], KVCache(keys, values))
        yield layers
    finally:
        for name, layer in layers.items():
            layer.backend, layer.kv_cache, layer.why_not_fp8_output = before[name]


def prompt_context(layers: dict[str, Attention], length: int, device: torch.device) -> ForwardContext:
    """A step in which one request reads a prompt of `length` tokens as a whole, over a cache of one block that holds all of them."""
    starts, seq_lens = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=seq_lens.to(device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        slot_mapping=torch.arange(length, device=device),
        num_requests=1,
        num_actual_tokens=length,
        max_query_len=length,
        max_seq_len=length,
        host=HostMetadata(query_start_loc=starts.numpy(), seq_lens=seq_lens.numpy()),
    )
    return ForwardContext(attention_layers=layers, attention_metadata=dict.fromkeys(layers, metadata), num_actual_tokens=length)
