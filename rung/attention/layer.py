"""The attention ops and the module that calls them.

`rung::rotate_and_write`, `rung::kv_cache_write` and `rung::attention` are split ops: the compiled graph is cut there and the stitched code
calls their Python implementations directly. All take the layer's name and look everything else up in the forward context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rung.attention.base import JOINED, AttentionBackend, AttentionMetadata, AttentionSpec, KVCache, answers_for
from rung.attention.rotation import Rotation
from rung.context import get_forward_context
from rung.errors import ContextError
from rung.launch import current_rehearsal

_library = torch.library.Library("rung", "FRAGMENT")
_library.define("kv_cache_write(Tensor key, Tensor value, str layer) -> Tensor")
_library.define(
    "rotate_and_write(Tensor query, Tensor key, Tensor value, Tensor(a!) rotated, Tensor cos, Tensor sin, str layer, "
    "Tensor? query_weight=None, Tensor? key_weight=None, float epsilon=0.0, float offset=0.0) -> Tensor"
)
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, str layer, Tensor? written=None, bool fresh=False, "
    "Tensor? out_scale=None) -> ()"
)

SPLIT_OPS = frozenset({"rung::rotate_and_write", "rung::kv_cache_write", "rung::attention"})


def _lookup(name: str) -> tuple[Attention, KVCache, AttentionMetadata]:
    context = get_forward_context()
    layer: Attention | None = context.attention_layers.get(name)
    metadata: AttentionMetadata | None = context.attention_metadata.get(name)
    if layer is None or metadata is None or layer.kv_cache is None or layer.backend is None:
        missing = "layer" if layer is None else "metadata" if metadata is None else "KV cache"
        raise ContextError(
            f"attention layer {name!r} has no {missing} in the forward context; known layers: {sorted(context.attention_layers)[:4]}",
            hint="bind every attention layer with `Attention.bind`, and give the context its layers and their metadata",
        )
    return layer, layer.kv_cache, metadata


def kv_cache_write(key: torch.Tensor, value: torch.Tensor, layer: str) -> torch.Tensor:
    """Write this step's keys and values ([num_tokens, num_kv_heads, head_size]) into the layer's cache; rows with slot -1 are skipped.

    Returns an empty tensor that orders the write before the attention call."""
    module, cache, metadata = _lookup(layer)
    assert module.backend is not None
    module.backend.write_kv(key, value, cache, metadata.slot_mapping)
    return key.new_empty(0)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotated: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: str,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Rotate this step's queries into `rotated` and its keys into the layer's cache, values beside them; see `Rotation`.

    Returns an empty tensor that orders the write before the attention call."""
    module, cache, metadata = _lookup(layer)
    assert module.backend is not None
    rotation = Rotation(cos=cos, sin=sin, query_weight=query_weight, key_weight=key_weight, epsilon=epsilon, offset=offset)
    module.backend.rotate_and_write(query, key, value, rotation, rotated, cache, metadata.slot_mapping)
    return key.new_empty(0)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    layer: str,
    written: torch.Tensor | None = None,
    fresh: bool = False,
    out_scale: torch.Tensor | None = None,
) -> None:
    """Attention of `query` ([num_tokens, num_heads, head_size]) into `out`; every row of `out` is written.

    `key` and `value` order this call behind the write. `fresh`: they are what was written, so a backend may read them if they are all.
    With `out_scale` ([1], float32) `out` is e4m3 and gets the result divided by it."""
    del written
    module, cache, metadata = _lookup(layer)
    assert module.backend is not None
    if out_scale is not None:
        module.backend.forward_quantised(query, cache, out, out_scale, metadata, (key, value) if fresh else None)
    elif fresh:
        module.backend.forward_given_keys(query, key, value, cache, out, metadata)
    else:
        module.backend.forward(query, cache, out, metadata)


def rotate_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotated: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer: str,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    offset: float = 0.0,
    *,
    given: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    fresh: bool = False,
    out_scale: torch.Tensor | None = None,
) -> None:
    """`rotate_and_write` and the `attention` of what it rotated (`given` are the keys and values of that call), for code that reads
    `rotated` nowhere else: where the backend does both at once it is not written."""
    module, cache, metadata = _lookup(layer)
    assert module.backend is not None
    rotation = Rotation(cos=cos, sin=sin, query_weight=query_weight, key_weight=key_weight, epsilon=epsilon, offset=offset)
    asked = answers_for(type(module.backend), "rotate_and_attend", JOINED)
    if asked and module.backend.rotate_and_attend(query, key, value, rotation, cache, out, metadata, out_scale):
        return
    module.backend.rotate_and_write(query, key, value, rotation, rotated, cache, metadata.slot_mapping)
    attention(rotated, *given, out, layer, None, fresh, out_scale)


def _rehearsed(run: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """`shapes` on tensors without memory; in a rehearsal after what the device would run, so that its kernels are known."""

    def call(*arguments: Any, **named: Any) -> Any:
        if current_rehearsal.get() is not None:
            run(*arguments, **named)
        return shapes(*arguments, **named)

    return call


def _fake_kv_cache_write(key: torch.Tensor, value: torch.Tensor, layer: str) -> torch.Tensor:
    return key.new_empty(0)


def _fake_rotate_and_write(query: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
    return query.new_empty(0)


def _fake_attention(query: torch.Tensor, *arguments: object, **named: object) -> None:
    return None


_library.impl("kv_cache_write", kv_cache_write, "CompositeExplicitAutograd")
_library.impl("rotate_and_write", rotate_and_write, "CompositeExplicitAutograd")
_library.impl("attention", attention, "CompositeExplicitAutograd")
torch.library.register_fake("rung::kv_cache_write", _rehearsed(kv_cache_write, _fake_kv_cache_write), lib=_library)
torch.library.register_fake("rung::rotate_and_write", _rehearsed(rotate_and_write, _fake_rotate_and_write), lib=_library)
torch.library.register_fake("rung::attention", _rehearsed(attention, _fake_attention), lib=_library)


class Attention(nn.Module):
    """Paged attention of one layer over the flat batch. `name` must be unique in the model.

    The KV cache and the backend are bound later, by `bind`; they are no parameters and no buffers. `key_scale` and `value_scale` are what
    an e4m3 cache that a runner allocates is scaled by (see `KVCache`): the largest magnitude to be kept, divided by 448, or more."""

    rung_unread_attributes = (
        "backend",
        "kv_cache",
        "key_scale",
        "value_scale",
        "why_not_fp8_output",
    )  # forward does not read them, so a plan does not depend on them

    def __init__(self, name: str, spec: AttentionSpec) -> None:
        super().__init__()
        self.name = name
        self.spec = spec
        self.backend: AttentionBackend | None = None
        self.kv_cache: KVCache | None = None
        self.key_scale = 1.0
        self.value_scale = 1.0
        self.why_not_fp8_output: str | None = "no attention backend was chosen before the compile"

    def choose(self, backend: type[AttentionBackend], device: torch.device) -> None:
        """Say before a compile which backend will be bound: what it can do besides decides about fusions with it."""
        self.why_not_fp8_output = backend.why_not_fp8_output(device)

    def bind(self, backend: AttentionBackend, kv_cache: KVCache) -> None:
        """Give the layer its backend and its cache; the caller keeps ownership of the cache."""
        self.backend = backend
        self.kv_cache = kv_cache
        self.choose(type(backend), kv_cache.key.device)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """query [num_tokens, num_heads, head_size], key and value [num_tokens, num_kv_heads, head_size] -> like query, contiguous.

        With `rotation`, query and key come as the projection made them, and are rotated on their way into the cache."""
        out = query.new_empty(query.shape)
        if rotation is None:
            written = torch.ops.rung.kv_cache_write(key, value, self.name)
            torch.ops.rung.attention(query, key, value, out, self.name, written, True)
            return out
        rotated = query.new_empty(query.shape)
        written = torch.ops.rung.rotate_and_write(
            query, key, value, rotated, rotation.cos, rotation.sin, self.name,
            rotation.query_weight, rotation.key_weight, rotation.epsilon, rotation.offset,
        )  # fmt: skip
        torch.ops.rung.attention(rotated, key, value, out, self.name, written)
        return out


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """All attention layers of a model by name."""
    return {module.name: module for module in model.modules() if isinstance(module, Attention)}
