"""Graphs for a wrapped module that serves no requests: static inputs, one named dimension, exact or padded sizes, outputs cut back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rung.compile.bound import BoundStep
from rung.compile.compiled import CompiledFunction
from rung.compile.plan import TensorSpec
from rung.config import CompileConfig
from rung.counters import Counters
from rung.errors import ConfigError, PaddingError, UnsupportedModuleError
from rung.graphs.backends import make_backend
from rung.graphs.buffers import BufferSpec, StaticBuffer
from rung.graphs.descriptor import Descriptor, GraphMode, Shape, exact
from rung.graphs.dispatch import Dispatch
from rung.graphs.ladder import DEFAULT_TOP, Ladder
from rung.graphs.manager import CaptureReport, GraphManager
from rung.graphs.outputs import OutputDims
from rung.graphs.padding import check_padding
from rung.graphs.reasons import Reason

_MAX_EXACT_SIZES = 64  # graphs of exact sizes; later sizes run without


class WrappedGraphs:
    """Runs a compiled function through graphs that are captured at the first call of each size.

    Inputs are copied into static buffers. Outputs are cloned by default, or borrowed until the next call. Sizes are exact unless the
    dimension is named in `pad`: the first padded call is compared with the exact one under two paddings. One lock serialises calls."""

    def __init__(self, compiled: CompiledFunction, config: CompileConfig, counters: Counters) -> None:
        self.compiled = compiled
        self.config = config
        self.counters = counters
        specs = dict(compiled.plan.tensors)
        self._specs = [
            _buffer_spec(name, specs[compiled.plan.inputs[n]]) for name, n in zip(compiled.input_names, compiled.arguments, strict=True)
        ]
        self.dim = _single_dimension(self._specs)
        self.padded = self.dim in config.pad
        self.ladder = self._make_ladder()
        self.mode = self._resolve_mode()
        self._dims: OutputDims | None = None  # known once padding was checked
        self._manager: GraphManager | None = None
        self._capacity = 0
        self._lock = threading.RLock()

    def __call__(self, *inputs: Any) -> Any:
        with self._lock:
            size = self._size(inputs)
            dispatch = self._dispatch(size)
            descriptor = dispatch.descriptor
            if descriptor.mode is GraphMode.NONE:
                self.counters.add(f"step.none.{dispatch.reason}")
                return self.compiled(*inputs)
            if self.padded and self._dims is None and descriptor.num_tokens > size:
                self._dims = self._check(inputs, size, descriptor.num_tokens)
            manager = self._manager_for(descriptor.num_tokens, inputs)
            self._write(manager, inputs, descriptor)
            if not manager.can_replay(descriptor):
                manager.capture([descriptor])
                self._write(manager, inputs, descriptor)
            outputs = manager.run(dispatch)
            cut = {self.dim: size}
            take = outputs.cut if self.config.outputs == "borrow" else outputs.clone
            flat = take(cut if self._dims is not None else None, self._dims)
            return self.compiled.restore(self._restore_sizes(flat, inputs), inputs)

    def capture(self, sizes: Sequence[int], inputs: Sequence[Any]) -> CaptureReport:
        """Capture `sizes` now. `inputs` are valid examples of any size; their rows are repeated."""
        with self._lock:
            manager = self._manager_for(max(sizes), inputs)
            descriptors = [Descriptor(mode=self.mode, num_tokens=size) for size in sizes]
            for value, spec, buffer in zip(inputs, self._specs, manager.inputs, strict=True):
                _fill(buffer, spec, value)
            return manager.capture(descriptors)

    def release(self) -> None:
        """Free graphs and buffers; the next call captures again."""
        with self._lock:
            if self._manager is not None:
                self._manager.release()
            self._manager = None

    # --- choosing --------------------------------------------------------------------------------------------------------------------

    def _make_ladder(self) -> Ladder:
        maximum = self.compiled.plan.bounds.get(self.dim)
        if self.config.capture_sizes is not None:
            return Ladder.custom(self.config.capture_sizes)
        return Ladder.up_to(min(maximum or DEFAULT_TOP, DEFAULT_TOP))

    def _resolve_mode(self) -> GraphMode:
        if self.config.graphs == "auto":
            has_breaks = any(step.kind == "break" for step in self.compiled.steps)
            return GraphMode.PIECEWISE if has_breaks else GraphMode.FULL
        return GraphMode(self.config.graphs)

    def _dispatch(self, size: int) -> Dispatch:
        none = exact(Shape(num_tokens=size))
        if size == 0:
            return Dispatch(none, Reason.EMPTY)
        target = self.ladder.pad_to(size) if self.padded else size
        if target is None:
            return Dispatch(none, Reason.TOO_MANY_TOKENS)
        if not self.padded and self.config.capture_sizes is not None and size not in self.ladder.sizes:
            return Dispatch(none, Reason.NOT_CAPTURED)
        descriptor = Descriptor(mode=self.mode, num_tokens=target)
        manager = self._manager
        if manager is not None and not self.padded and not manager.can_replay(descriptor) and manager.num_captured >= _MAX_EXACT_SIZES:
            return Dispatch(none, Reason.NOT_CAPTURED)
        return Dispatch(descriptor, Reason.BEST, target - size)

    def _size(self, inputs: Sequence[Any]) -> int:
        for spec, value in zip(self._specs, inputs, strict=True):
            for dim, extent in enumerate(spec.shape):
                if extent == self.dim:
                    return int(value.shape[dim])
        return 1  # no dynamic dimension: one size

    # --- running ---------------------------------------------------------------------------------------------------------------------

    def _manager_for(self, size: int, inputs: Sequence[Any]) -> GraphManager:
        """The manager, with buffers for at least `size`. A larger size than ever before starts anew: addresses must not change."""
        if self._manager is None or size > self._capacity:
            self.release()
            _refuse_written_inputs(self.compiled, inputs)
            self._capacity = max(size, self.ladder.top if self.padded else size)
            device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), self.compiled.device)
            buffers = [StaticBuffer(spec, capacity={self.dim: self._capacity}, device=device) for spec in self._specs]
            self._manager = GraphManager(self.compiled, make_backend(device), inputs=buffers, dim=self.dim, counters=self.counters)
        return self._manager

    def _write(self, manager: GraphManager, inputs: Sequence[Any], descriptor: Descriptor) -> None:
        for buffer, value in zip(manager.inputs, inputs, strict=True):
            buffer.write(value, descriptor.sizes(self.dim))

    def _check(self, inputs: Sequence[Any], size: int, padded: int) -> OutputDims:
        """Raise `PaddingError` when padded rows reach real ones; else the dimensions by which each output is cut."""

        def run(values: list[Any]) -> list[Any]:
            return self._restore_sizes(self.compiled.run_steps(values, _call), values)

        specs = [_with_valid_range(spec, value) for spec, value in zip(self._specs, inputs, strict=True)]
        with torch.no_grad():
            return check_padding(run, specs, list(inputs), {self.dim: padded})

    def _restore_sizes(self, flat: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Sizes among the outputs are those of the caller's tensors, not of the padded buffers."""
        plan = self.compiled.plan
        owners = {plan.inputs[n]: value for n, value in zip(self.compiled.arguments, inputs, strict=True)}
        restored = list(flat)
        for index, output in enumerate(plan.outputs):
            path = plan.inputs[output["value"]] if output.get("value", len(plan.inputs)) < len(plan.inputs) else None
            if path is not None and path.dim is not None:
                restored[index] = owners[replace(path, dim=None)].shape[path.dim]
            elif "value" in output and not isinstance(restored[index], torch.Tensor) and self.padded:
                raise PaddingError(
                    f"output {index} is a number computed from the padded size", hint="return sizes as they are, or run at exact sizes"
                )
        return restored


def _call(step: BoundStep, arguments: list[Any]) -> Sequence[Any]:
    return step.call(arguments)


def _with_valid_range(spec: BufferSpec, example: torch.Tensor) -> BufferSpec:
    """Integers are mostly indices: what the example holds is what padding may hold."""
    if spec.dtype.is_floating_point or spec.dtype == torch.bool or not example.numel():
        return spec
    return replace(spec, valid=(int(example.min()), int(example.max()) + 1))


def _buffer_spec(name: str, spec: TensorSpec) -> BufferSpec:
    return BufferSpec(name=name, shape=spec.shape, dtype=getattr(torch, spec.dtype.removeprefix("torch.")))


def _single_dimension(specs: Sequence[BufferSpec]) -> str:
    names = {extent for spec in specs for extent in spec.shape if isinstance(extent, str)}
    if len(names) > 1:
        raise ConfigError(
            f"graphs serve one dynamic dimension, this module has {sorted(names)}",
            hint="give dimensions that are always equal one name, or leave the others out of `dynamic`",
        )
    return next(iter(names), "size")


def _fill(buffer: StaticBuffer, spec: BufferSpec, example: torch.Tensor) -> None:
    """Valid values in every row of a buffer: the rows of an example, repeated."""
    view = buffer.view(buffer.capacity)
    for dim, extent in enumerate(spec.shape):
        if isinstance(extent, str):
            rows = torch.arange(view.shape[dim], device=view.device) % max(example.shape[dim], 1)
            example = example.index_select(dim, rows)
    view.copy_(example)


def _refuse_written_inputs(compiled: CompiledFunction, inputs: Sequence[Any]) -> None:
    """A graph would write into its static buffer and not into the caller's tensor."""
    given = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.no_grad():
        compiled.run_steps(given, _call)
    for name, before, after in zip(compiled.input_names, inputs, given, strict=True):
        if isinstance(before, torch.Tensor) and not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise UnsupportedModuleError(
                f"the module writes into its argument {name!r}; under graphs that would be lost",
                hint="write into a registered buffer, return the value, or wrap the module without graphs",
            )
