"""Graph backends: `cuda` for devices, `recorded` for machines without one."""

from __future__ import annotations

import torch

from rung.errors import BackendUnavailableError
from rung.graphs.backends.base import CapturedGraph, GraphBackend, GraphPool
from rung.graphs.backends.cuda import CudaBackend
from rung.graphs.backends.recorded import RecordedBackend

_BACKENDS: dict[str, type[GraphBackend]] = {backend.name: backend for backend in (CudaBackend, RecordedBackend)}


def make_backend(device: torch.device | str, requested: str = "auto") -> GraphBackend:
    """The graph backend for `device`. "auto" takes the first that can. Raises `BackendUnavailableError` with the reason."""
    device = torch.device(device)
    if requested != "auto" and requested not in _BACKENDS:
        raise BackendUnavailableError(f"there is no graph backend {requested!r}", hint=f"choose one of auto, {', '.join(_BACKENDS)}")
    wanted = list(_BACKENDS.values()) if requested == "auto" else [_BACKENDS[requested]]
    reasons = [(backend.name, backend.why_not(device)) for backend in wanted]
    for backend, (_, reason) in zip(wanted, reasons, strict=True):
        if reason is None:
            return backend(device)
    raise BackendUnavailableError(
        "no graph backend can run here: " + "; ".join(f"{name}: {reason}" for name, reason in reasons),
        hint="run without graphs, or put the tensors on a CPU or CUDA device",
    )


__all__ = ["CapturedGraph", "CudaBackend", "GraphBackend", "GraphPool", "RecordedBackend", "make_backend"]
