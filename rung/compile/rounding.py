"""How far two runs of one graph may differ because of rounding alone: fused code rounds fewer intermediates, and libraries sum in other
orders.

What may be expected at once is a part of the output's norm, by the coarsest dtype that the graph holds. That is too little where
values cancel, such as the mean of centred rows, and says nothing of integers made from floats, such as quantised rows and chosen experts.
There the graph itself tells: it runs again with every value inside moved by about what it is rounded by (as in Monte Carlo arithmetic:
Parker, Pierce, Eggert, "How to gamble with floating point and win", 2000)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from rung.compile.split import mutates

# Activations are rounded to e4m3 (2^-4 of a value) in some kernels for a product and not in others, and a piece has up to four in a row.
RELATIVE_ERROR_E4M3 = 0.1
_RELATIVE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float8_e4m3fn: RELATIVE_ERROR_E4M3, torch.float8_e5m2: 0.2}
_LEAST_ERROR = 1e-4
SHAKEN_RUNS = 8  # of two equal values in bf16, one lies before the other in one of them at least, but for two times in a hundred
_MARGIN = 2.0  # an operation of the trace is several of the code, each with its rounding
_SUMS = 32.0  # steps of float32 and float64, in which sums are made; a sum in bf16 is one in float32 that is rounded once


def float_dtypes(graph: fx.Graph) -> set[torch.dtype]:
    """Of all values of a traced graph."""
    found: list[Any] = []
    map_aggregate([node.meta.get("example_value") for node in graph.nodes], found.append)
    return {value.dtype for value in found if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())}


def tolerance_of(graph: fx.Graph) -> float:
    """The part of an output's norm that it may be off by."""
    return max((_RELATIVE_ERROR.get(dtype, _LEAST_ERROR) for dtype in float_dtypes(graph)), default=_LEAST_ERROR)


def agree(want: Any, got: Any, tolerance: float) -> bool:
    """Equal up to `tolerance` of the norm; what is no float, exactly. NaN of `want` is nothing that could be judged, and counts as 0."""
    if not isinstance(want, torch.Tensor):
        return bool(want == got)
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(want, got)
    wide, other = _wide(want), _wide(got)
    return torch.equal(wide.isinf(), other.isinf()) and _distance(wide, other) <= tolerance * float(_finite(wide).norm())


def explained(want: Any, got: Any, shaken: Sequence[Any]) -> bool:
    """Whether `got` is no further from `want` than results of shaken runs are. Of integers that no shaken run
    has moved one may differ for four that were moved."""
    if not shaken or not isinstance(want, torch.Tensor) or want.shape != got.shape or want.dtype != got.dtype:
        return False
    runs = [_wide(run) for run in shaken if run.shape == want.shape]
    wide, other = _wide(want), _wide(got)
    if not torch.equal(wide.isinf(), other.isinf()):
        return False
    if _distance(wide, other) > _MARGIN * max((_distance(wide, run) for run in runs), default=0.0):
        return False
    if want.is_floating_point() or want.is_complex():
        return True
    moved = torch.stack([run != wide for run in runs]).any(0)
    return 4 * int(((got != want) & ~moved).sum()) <= int(moved.sum())


class ShakenRun(fx.Interpreter):
    """Runs a traced graph with each float that an operation makes, and each input but parameters, moved by about one rounding."""

    def __init__(self, graph_module: fx.GraphModule, seed: int) -> None:
        super().__init__(graph_module)
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}  # of its own: random numbers of the graph stay the same

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("get_attr", "output") or mutates(n) or isinstance(result, torch.nn.Parameter):
            return result
        given: list[Any] = []
        map_aggregate([self.env[node] for node in n.all_input_nodes], given.append)
        known = {_address(value) for value in given if isinstance(value, torch.Tensor)}  # a view has the values of what it looks into
        return self._shake(result, known)

    def _shake(self, value: Any, known: set[int]) -> Any:
        if isinstance(value, tuple | list):
            return type(value)([self._shake(item, known) for item in value])
        if not _rounded(value) or _address(value) in known:
            return value
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        wide = value.double() if value.dtype == torch.float64 else value.float()
        step = torch.finfo(value.dtype).eps * (1.0 if value.itemsize < 4 else _SUMS)
        return (wide + wide * torch.empty_like(wide).normal_(generator=generator) * step).to(value.dtype)


def _rounded(value: Any) -> bool:
    """Whether it may be shaken. Values of e4m3 are not: a step up from the largest one is NaN."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _wide(value: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def _finite(wide: torch.Tensor) -> torch.Tensor:
    return wide.nan_to_num(0.0, 0.0, 0.0)


def _distance(wide: torch.Tensor, other: torch.Tensor) -> float:
    return float((_finite(wide) - _finite(other)).norm())
