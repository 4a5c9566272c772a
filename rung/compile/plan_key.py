"""What a plan depends on, as far as it is known before any trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rung.cache import Factor, Factors
from rung.compile import plan as plan_module
from rung.compile.arguments import leaves
from rung.compile.fingerprint import fingerprint
from rung.compile.paths import Path
from rung.compile.trace import DynamicDims
from rung.compile.whole import whole_factors
from rung.config import CompileConfig


def plan_factors(
    function: Callable[..., Any],
    locals_: Mapping[str, Any],
    tensors: Sequence[tuple[Path, torch.Tensor]],
    dims: DynamicDims,
    config: CompileConfig,
    code: Factors,
) -> tuple[Factors, list[str]]:
    """`code` and the factors of the plan of a call, and the attributes of the module that cannot be described."""
    owner = getattr(function, "__self__", None)
    described, opaque = fingerprint(owner) if isinstance(owner, nn.Module) else ({}, [])
    constants = [(path, value) for path, value in leaves(locals_) if not isinstance(value, torch.Tensor)]
    factors = Factors(code)
    found = {
        "format": plan_module.FORMAT,
        "entry": entry_name(function),
        "module": described,
        "dynamic": {name: {str(dim): symbol for dim, symbol in d.items()} for name, d in dims.items()},
        "maximum": config.maximum,
        "breaks": config.breaks,
        "split_ops": sorted(config.split_ops),
        "pad": sorted(config.pad),
        "row_wise_ops": sorted(config.row_wise_ops),
        "whole_passes": whole_factors(config),
        "expect": dict(sorted(config.expect.items())),
        "tensors": {path.dotted(): [str(t.dtype), t.device.type, _shape(path, t, dims)] for path, t in tensors},
        "constants": [[path.expression(), f"{type(value).__name__} {value!r}"] for path, value in constants],
    }
    for name, value in found.items():
        factors.add(Factor(name, value, changes_code=False))
    return factors, opaque


def entry_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _shape(path: Path, tensor: torch.Tensor, dims: DynamicDims) -> list[int | str]:
    named = dims.get(path.dotted(), {})
    return [named.get(dim, extent) for dim, extent in enumerate(tensor.shape)]
