"""Inductor's wrappers on tensors without memory: sizes and custom ops as on the device, and nothing of Inductor's own runs.

Checked on torch 2.11.0. For a process that builds for a device it does not have (`pretend_cuda`), and for a start that asks which kernels
it will need.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rung.errors import CompileError
from rung.torch_compat.sizes import evaluate_size


def memoryless(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A loaded piece, by whichever loader, as a function of tensors without memory; the piece itself stays as it is. For equal layouts it
    runs once, and returns the same tensors again: there is nothing in them. Raises `CompileError` for a wrapper of another make."""
    entry: Any = _entry(call)
    owner = getattr(entry, "__self__", None)
    if getattr(owner, "partitions", None):
        raise CompileError("a piece is cut into partitions", hint="use torch 2.11 with cudagraph partitions off")
    plain = getattr(entry, "__func__", entry)
    names = {
        name: _Nothing() if hasattr(value, "run") and type(value).__module__.startswith(("torch._inductor.", "rung.launch.")) else value
        for name, value in plain.__globals__.items()
    }
    names |= {
        "empty_strided_cuda": _empty_strided,
        "reinterpret_tensor": _reinterpret,
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "get_raw_stream": lambda index: 0,
        "device_guard": lambda ordinal: contextlib.nullcontext(),
    }
    copy = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    run: Callable[[list[Any]], Any] = copy if owner is None else types.MethodType(copy, owner)
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def recall(arguments: list[Any]) -> tuple[Any, ...]:
        layouts = tuple(_layout(argument) for argument in arguments)
        if layouts not in known:
            known[layouts] = tuple(run(arguments))
        arguments.clear()
        return known[layouts]

    return recall


def _layout(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.shape, argument.stride(), argument.storage_offset(), argument.dtype


@contextlib.contextmanager
def fakes_of(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Tensors of the layouts of `values` without memory (other values as they are); inside, new tensors have none either."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        yield [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in values]


def fake_mode_of(module: torch.nn.Module) -> Any:
    """The mode of the tensors that `without_memory` made; active, it gives all new tensors no memory."""
    fake: Any = next(module.parameters())
    return fake.fake_mode


def run_memoryless(node: torch.fx.Node, size: int) -> None:
    """Run an operation of a graph that a compiler has in hand on tensors without memory, every symbol being `size`. What it raises goes
    through, `KeyError` for arguments that nobody gave a value."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def concrete(argument: torch.fx.Node) -> Any:
        value = argument.meta["val"]
        if not isinstance(value, torch.Tensor):
            return evaluate_size(value, size)
        shape, stride = ([evaluate_size(extent, size) for extent in layout] for layout in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    with FakeTensorMode(), torch.no_grad():
        node.target(*torch.fx.node.map_arg(node.args, concrete), **torch.fx.node.map_arg(node.kwargs, concrete))  # type: ignore[operator]


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
        names = getattr(plain, "__globals__", {})
        if "empty_strided_cuda" in names:
            return names.get("_call", item)  # behind a look at addresses (`rung.launch.alignment`)
        for cell in getattr(plain, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
    raise CompileError("a piece has no generated wrapper inside", hint="use torch 2.11")
