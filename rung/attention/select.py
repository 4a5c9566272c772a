"""Which attention backend serves a layer, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rung.attention.backends.flash_attn import FlashAttention2, FlashAttention3
from rung.attention.backends.flash_triton import FlashTriton
from rung.attention.backends.torch_reference import TorchReference
from rung.attention.backends.triton_paged import TritonPaged
from rung.attention.base import AttentionBackend, AttentionSpec
from rung.errors import BackendUnavailableError

# In the order in which "auto" prefers them.
_ON_CUDA: tuple[type[AttentionBackend], ...] = (FlashTriton, FlashAttention3, FlashAttention2, TritonPaged, TorchReference)
_ELSEWHERE: tuple[type[AttentionBackend], ...] = (TorchReference,)


def backend_names() -> tuple[str, ...]:
    """The names that `select_backend` takes besides "auto"."""
    return tuple(backend.name for backend in _ON_CUDA)


def select_backend(
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    requested: str = "auto",
    *,
    fp8_cache: bool = False,
    batch_invariant: bool = False,
) -> tuple[type[AttentionBackend], str]:
    """The backend for such a layer and the reason for the choice. `fp8_cache`: keys and values are kept as e4m3; `batch_invariant`: the
    bits of a row must not depend on its batch.

    `requested` is "auto" or a name of `backend_names()`; a named backend is never replaced by another. Raises
    `BackendUnavailableError` when the name is unknown, or when the backend cannot serve the layer here."""

    def why_not(backend: type[AttentionBackend]) -> str | None:
        reasons = (
            backend.why_not(spec, dtype, device, block_size),
            backend.why_not_fp8_cache(device) if fp8_cache else None,
            backend.why_not_batch_invariant() if batch_invariant else None,
        )
        return next((reason for reason in reasons if reason is not None), None)

    if requested != "auto":
        return _named(requested, why_not), f"{requested}: requested by name"
    passed_over: list[str] = []
    for backend in _ON_CUDA if device.type == "cuda" else _ELSEWHERE:
        reason = why_not(backend)
        if reason is None:
            return backend, "; ".join([f"{backend.name}: first that can serve the layer on {device.type}", *passed_over])
        passed_over.append(f"not {backend.name}: {reason}")
    raise BackendUnavailableError(
        f"no attention backend can serve {spec} in {dtype} on {device}: " + "; ".join(passed_over),
        hint="change the dtype or the device",
    )


def _named(requested: str, why_not: Callable[[type[AttentionBackend]], str | None]) -> type[AttentionBackend]:
    known = {backend.name: backend for backend in _ON_CUDA}
    backend = known.get(requested)
    if backend is None:
        raise BackendUnavailableError(
            f"attention backend: expected 'auto' or one of {', '.join(known)}, got {requested!r}", hint="use 'auto' to let rung choose"
        )
    reason = why_not(backend)
    if reason is not None:
        raise BackendUnavailableError(f"attention backend {requested!r} cannot be used: {reason}", hint="use 'auto' to let rung choose")
    return backend
