"""Around the graphs of a wrapped module: the static buffers of its arguments, and the buffers of its own that it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rung.compile.bound import call_step
from rung.compile.compiled import CompiledFunction
from rung.compile.plan import TensorSpec
from rung.errors import UnsupportedModuleError
from rung.graphs.buffers import BufferSpec, StaticBuffer


def written_weights(compiled: CompiledFunction) -> list[int]:
    return [number for number in compiled.plan.written if number in compiled.weights]


@contextmanager
def kept_state(compiled: CompiledFunction) -> Iterator[list[torch.Tensor]]:
    """Runs inside the block belong to nobody: buffers that the module updates in place are put back. Yields those buffers. Code that runs
    eagerly because it would not trace may update any buffer, so with such regions all of them are put back."""
    written = [compiled.weights[number] for number in written_weights(compiled)]
    kept = list({id(tensor): tensor for tensor in (*written, *compiled.region_buffers)}.values())
    with torch.no_grad():
        saved = [tensor.clone() for tensor in kept]
        try:
            yield written
        finally:
            for tensor, values in zip(kept, saved, strict=True):
                tensor.copy_(values)


def with_valid_range(spec: BufferSpec, example: torch.Tensor) -> BufferSpec:
    """Integers are mostly indices: what the example holds is what padding may hold."""
    if spec.dtype.is_floating_point or spec.dtype == torch.bool or not example.numel():
        return spec
    return replace(spec, valid=(int(example.min()), int(example.max()) + 1))


def buffer_specs(compiled: CompiledFunction) -> list[BufferSpec]:
    """Of the arguments, in order."""
    specs, inputs = dict(compiled.plan.tensors), compiled.plan.inputs
    return [_buffer_spec(name, specs[inputs[n]]) for name, n in zip(compiled.input_names, compiled.arguments, strict=True)]


def _buffer_spec(name: str, spec: TensorSpec) -> BufferSpec:
    return BufferSpec(name=name, shape=spec.shape, dtype=getattr(torch, spec.dtype.removeprefix("torch.")))


def dimensions(specs: Sequence[BufferSpec]) -> tuple[str, ...]:
    """Names of the dynamic dimensions in the order of the arguments; one name for a module without any."""
    return tuple(dict.fromkeys(extent for spec in specs for extent in spec.shape if isinstance(extent, str))) or ("size",)


def fill(buffer: StaticBuffer, spec: BufferSpec, example: torch.Tensor) -> None:
    """Valid values in every row of a buffer: the rows of an example, repeated."""
    view = buffer.view(buffer.capacity)
    for dim, extent in enumerate(spec.shape):
        if isinstance(extent, str):
            rows = torch.arange(view.shape[dim], device=view.device) % max(example.shape[dim], 1)
            example = example.index_select(dim, rows)
    view.copy_(example)


def refuse_written_inputs(compiled: CompiledFunction, inputs: Sequence[Any]) -> None:
    """A graph would write into its static buffer and not into the caller's tensor."""
    given = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.no_grad():
        compiled.run_steps(given, call_step)
    for name, before, after in zip(compiled.input_names, inputs, given, strict=True):
        if isinstance(before, torch.Tensor) and not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise UnsupportedModuleError(
                f"the module writes into its argument {name!r}; under graphs that would be lost",
                hint="write into a registered buffer, return the value, or wrap the module without graphs",
            )
