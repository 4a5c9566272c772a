"""Launching `layer_kernel`: a layer's tensors in, its outputs into tensors that the caller keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from rung.launch import TritonLauncher

LAYER = TritonLauncher("bench.persistent_kernels", "layer_kernel")
BLOCKS = {"A": (1, 2), "B": (0, 2), "C": (0, 3)}  # the phases of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The widths of a decoder layer."""

    hidden: int
    query: int
    inner: int
    qkv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a launch is cut, and how its programs wait for each other."""

    programs: int
    num_warps: int = 8
    words: bool = True  # rows travel with the number of the launch, else a counter is awaited
    ahead: int = 1  # phases
    pause: int = 0  # ns between two looks at words that are not there yet

    def __str__(self) -> str:
        waiting = f"words, pause {self.pause}" if self.words else "counter"
        return f"{self.programs} programs, {self.num_warps} warps, {waiting}, {self.ahead} ahead"


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer, [n, k] and contiguous; qkv and the norm before it are the next layer's."""

    o: torch.Tensor
    norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    next_norm: torch.Tensor
    qkv: torch.Tensor

    @classmethod
    def make(cls, sizes: Sizes, device: str, dtype: torch.dtype = torch.bfloat16) -> Weights:
        shapes = (sizes.hidden, sizes.query), (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner), (sizes.qkv, sizes.hidden)
        o, gate_up, down, qkv = (torch.randn(n, k, device=device).mul_(k**-0.5).to(dtype) for n, k in shapes)
        norm, next_norm = (torch.rand(sizes.hidden, device=device).add_(0.5).to(dtype) for _ in range(2))
        return cls(o, norm, gate_up, down, next_norm, qkv)


@dataclass(frozen=True, slots=True)
class Rows:
    """What goes through a layer, [rows, width], every tensor of its own memory. `words` and `state` are what programs tell each other."""

    attended: torch.Tensor
    residual: torch.Tensor
    hidden: torch.Tensor
    activated: torch.Tensor
    out: torch.Tensor
    qkv: torch.Tensor
    words: torch.Tensor
    state: torch.Tensor

    @classmethod
    def make(cls, sizes: Sizes, rows: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Rows:
        widths = sizes.query, sizes.hidden, sizes.hidden, sizes.inner, sizes.hidden, sizes.qkv
        tensors = [torch.randn(rows, width, device=device).to(dtype) for width in widths]
        words = torch.zeros(((rows + 1) // 2, 2 * sizes.hidden + sizes.inner), dtype=torch.int64, device=device)
        return cls(*tensors, words, torch.zeros(1024, dtype=torch.int32, device=device))

    def next_layer(self, first: int) -> Rows:
        """The rows of the layer behind, whose first phase is `first` (0 or 1) and takes our `out`."""
        taken = {"hidden": self.out} if first else {"residual": self.out}
        return replace(self, **taken, out=torch.empty_like(self.out))


def arguments(block: tuple[int, int], weights: Weights, rows: Rows, setting: Setting, wait: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values and constants of a launch of the phases `block`."""
    values = (
        rows.attended, rows.residual, rows.hidden, rows.activated, rows.out, rows.qkv,
        weights.o, weights.norm, weights.gate_up, weights.down, weights.next_norm, weights.qkv, rows.words, rows.state, 1e-5,
    )  # fmt: skip
    first, last = block
    named = {
        "ROWS": rows.hidden.shape[0],
        "HIDDEN": weights.o.shape[0],
        "QUERY": weights.o.shape[1],
        "INNER": weights.down.shape[1],
        "QKV": weights.qkv.shape[0],
        "PROGRAMS": setting.programs,
        "FIRST": first,
        "LAST": last,
        "WORDS": setting.words,
        "AHEAD": setting.ahead,
        "WAIT": wait,
        "PAUSE": setting.pause,
        "WARPS": setting.num_warps,
        "num_warps": setting.num_warps,
        "launch_pdl": wait,
    }
    return values, named


def run(block: tuple[int, int], weights: Weights, rows: Rows, setting: Setting, *, wait: bool = True) -> None:
    """The phases `block` of a layer. `wait` false: by one program, or one phase only; what Triton's interpreter can do."""
    values, named = arguments(block, weights, rows, setting, wait)
    LAYER.run((setting.programs, 1, 1), *values, **named)


def reference(block: tuple[int, int], weights: Weights, rows: Rows) -> dict[str, torch.Tensor]:
    """What the phases `block` write, computed in float32; where a phase of the block wrote its input, from that."""
    first, last = block
    found: dict[str, torch.Tensor] = {}
    hidden, activated = rows.hidden.float(), rows.activated.float()
    if first == 0:
        hidden = rows.residual.float() + rows.attended.float() @ weights.o.float().T
        found["hidden"] = hidden
    if first <= 1 <= last:
        gate, up = (_normed(hidden, weights.norm) @ weights.gate_up.float().T).chunk(2, dim=1)
        activated = torch.nn.functional.silu(gate) * up
        found["activated"] = activated
    out = rows.out.float()
    if first <= 2 <= last:
        out = hidden + activated @ weights.down.float().T
        found["out"] = out
    if last == 3:
        found["qkv"] = _normed(out, weights.next_norm) @ weights.qkv.float().T
    return found


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight.float(), 1e-5)
