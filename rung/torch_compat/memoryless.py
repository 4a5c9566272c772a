"""Inductor's wrappers on tensors without memory: sizes and custom ops as on the device, and nothing of Inductor's own runs.

Checked on torch 2.11.0. For a process that builds for a device it does not have (`pretend_cuda`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rung.errors import CompileError


def memoryless(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A loaded piece, by whichever loader, as a function of tensors without memory. The loaded wrapper is changed for good."""
    entry: Any = _entry(call)
    names = entry.__func__.__globals__ if isinstance(entry, types.MethodType) else entry.__globals__
    for name, value in list(names.items()):
        if hasattr(value, "run") and type(value).__module__.startswith(("torch._inductor.", "rung.launch.")):
            names[name] = _Nothing()
    names |= {
        "empty_strided_cuda": _empty_strided,
        "reinterpret_tensor": _reinterpret,
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "get_raw_stream": lambda index: 0,
        "device_guard": lambda ordinal: contextlib.nullcontext(),
    }
    found: Callable[[list[Any]], Any] = entry
    return found


def fake_mode_of(module: torch.nn.Module) -> Any:
    """The mode of the tensors that `without_memory` made; active, it gives all new tensors no memory."""
    fake: Any = next(module.parameters())
    return fake.fake_mode


class _Nothing:
    """Stands for a kernel."""

    def run(self, *arguments: Any, **named: Any) -> None:
        return None


def _nothing(*arguments: Any) -> None:
    return None


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, int(tensor.storage_offset()) + offset)


def _entry(call: Any) -> Any:
    """The generated function of a wrapper, below what Inductor put around it: the one whose globals hold a wrapper's names."""
    waiting = [call]
    while waiting:
        item = waiting.pop()
        plain = getattr(item, "__func__", item)
        if "empty_strided_cuda" in getattr(plain, "__globals__", {}):
            return item
        for cell in getattr(plain, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
    raise CompileError("a piece has no generated wrapper inside", hint="use torch 2.11")
