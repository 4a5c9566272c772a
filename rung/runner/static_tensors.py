"""The tensors that captured steps read besides the module's own, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial

import torch

from rung.attention import Attention


def cache_tensors(layers: Mapping[str, Attention]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The KV cache that is bound to each layer when the reader is called."""
    for name, layer in layers.items():
        for part in ("key", "value"):
            yield f"{name}.kv_cache.{part}", partial(_cache_part, layer, part)


def tensors_of(label: str, owner: object) -> Iterator[tuple[str, Callable[[], object]]]:
    """The attributes of an object that are tensors."""
    for attribute in [item.name for item in fields(owner)] if is_dataclass(owner) else vars(owner):
        if isinstance(getattr(owner, attribute), torch.Tensor):
            yield f"{label} {attribute}", partial(getattr, owner, attribute)


def _cache_part(layer: Attention, part: str) -> object:
    return getattr(layer.kv_cache, part, None)
