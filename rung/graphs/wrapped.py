"""Graphs for a wrapped module that serves no requests: static inputs, named dimensions, exact or padded sizes, outputs cut back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rung.compile.compiled import CompiledFunction
from rung.config import CompileConfig
from rung.counters import Counters
from rung.graphs.backends import make_backend
from rung.graphs.buffers import StaticBuffer
from rung.graphs.capture_report import CaptureReport
from rung.graphs.descriptor import Descriptor, GraphMode, exact
from rung.graphs.dispatch import Dispatch
from rung.graphs.guard import Addresses, module_tensors, other_tensors
from rung.graphs.manager import GraphManager
from rung.graphs.memory import MemoryReport
from rung.graphs.memory_budget import MemoryBudget
from rung.graphs.module_grid import module_grid, sizes_to_capture
from rung.graphs.module_io import buffer_specs, dimensions, fill, kept_state, refuse_written_inputs, written_weights
from rung.graphs.module_padding import ModulePadding
from rung.graphs.outputs import copy_into, output_tensors
from rung.graphs.ranges import nvtx_ranges
from rung.graphs.reasons import Reason
from rung.graphs.step_log import StepLog
from rung.graphs.traffic import Traffic
from rung.torch_compat import tree_leaves

_MAX_GRAPHS = 64  # graphs of exact sizes, or of combinations of several dimensions; later ones run without


class WrappedGraphs:
    """Runs a compiled function through graphs that are captured at the first call of each size, or combination of sizes.

    Inputs are copied into static buffers. Outputs are cloned by default, or borrowed until the next call. Sizes are exact unless the
    dimension is named in `pad`: then the plan must prove that its rows are independent, and the first padded call is compared with the
    exact one under two paddings. One lock serialises calls; they may come from any thread, on any stream. `last` is the latest decision.
    A break that calls the module again finds buffers and pool in use: the inner call runs without graphs."""

    def __init__(
        self,
        compiled: CompiledFunction,
        config: CompileConfig,
        counters: Counters,
        log: StepLog | None = None,
        *,
        owner: Any = None,
        rebind: Callable[[], None] | None = None,
    ) -> None:
        self.compiled = compiled
        self.config = config
        self.counters = counters
        self.last: Dispatch | None = None
        self._ranges = nvtx_ranges(config.nvtx)
        self._traffic = Traffic(config.capture_after)
        self._suspended = False
        self._specs = buffer_specs(compiled)
        self.dims = dimensions(self._specs)  # the first is counted by `Descriptor.num_tokens`
        self.padded = frozenset(compiled.plan.rows) & set(self.dims)
        self.grid = module_grid(compiled, config, self.dims, self.padded)
        self._padding = ModulePadding(compiled, self._specs, self.padded, counters, allow_unproved=config.pad_unproved)
        self._manager: GraphManager | None = None
        self._capacity = dict.fromkeys(self.dims, 0)
        self._addresses = Addresses(
            watched=lambda: [*(module_tensors(owner) if isinstance(owner, torch.nn.Module) else ()), *other_tensors(compiled, owner)],
            on_change=config.on_address_change,
            rebind=rebind,
            before_replay=bool(written_weights(compiled)),
        )
        self._lock = threading.RLock()
        self.log = log or self._open_log()

    def __call__(self, *inputs: Any) -> Any:
        with self._lock:
            return self._run(inputs, self.config.outputs)

    def into(self, out: Any, *inputs: Any) -> Any:
        """A call whose output tensors are copied into those of `out`, in order; nothing else is copied. Returns `out`."""
        with self._lock, torch.no_grad():
            copy_into(tree_leaves(out), output_tensors(self._run(inputs, "borrow")))
        return out

    def _run(self, inputs: Sequence[Any], policy: str) -> Any:
        with self._lock:
            self._padding.refuse_unproved()
            sizes = self._sizes(inputs)
            dispatch = self._available(self._dispatch(sizes), sizes)
            result = self._step(dispatch, inputs, sizes, policy)
            self.last = dispatch
            if self.log is not None:
                self.log.add(self.grid.shape(sizes), dispatch)
            return result

    def _step(self, dispatch: Dispatch, inputs: Sequence[Any], sizes: Mapping[str, int], policy: str) -> Any:
        descriptor = dispatch.descriptor
        if descriptor.mode is GraphMode.NONE:
            self.counters.add(dispatch.counter)
            if self._ranges is None:
                return self.compiled(*inputs)
            return self.compiled.restore(self.compiled.run_steps(inputs, self._ranges.step), inputs)
        target = descriptor.sizes(self.dims[0])
        self._padding.check(inputs, sizes, target)
        manager = self._manager_for(target, inputs)
        with manager.step():
            self._write(manager, inputs, descriptor)
            if not manager.can_replay(descriptor):
                self._traffic.drop(descriptor)
                manager.capture([descriptor], self._prepare)
                if descriptor in manager.trimmed:
                    self.counters.add(f"step.none.{Reason.MEMORY_BUDGET}")
                    return self.compiled(*inputs)
                self._write(manager, inputs, descriptor)
            outputs = manager.run(dispatch)
            take = outputs.cut if policy == "borrow" else outputs.clone
            flat = take(sizes, self.compiled.plan.output_dims) if dispatch.padding else take(None)
            return self.compiled.restore(self._padding.restore_sizes(flat, inputs), inputs)

    def capture(self, sizes: Sequence[int | Mapping[str, int]], inputs: Sequence[Any]) -> CaptureReport:
        """Capture `sizes` now: numbers, or the size of each dimension by name. `inputs` are valid examples; they are repeated as needed.
        Raises `LadderError` or `ConfigError` for a size that no call can have."""
        with self._lock:
            if self._manager is not None:
                self._manager.refuse_nested()
            self._padding.refuse_unproved()
            wanted = sizes_to_capture(sizes, self.dims, self.compiled.plan.bounds)
            manager = self._manager_for({name: max(size[name] for size in wanted) for name in self.dims}, inputs)
            descriptors = [self.grid.descriptor(size) for size in wanted]
            for value, spec, buffer in zip(inputs, self._specs, manager.inputs, strict=True):
                fill(buffer, spec, value)
            return manager.capture(descriptors, self._prepare)

    def weights_changed(self) -> None:
        """The module's tensors may be others now. Follows the address policy where graphs read them; raises `AddressChangedError`."""
        with self._lock:
            if self._manager is not None:
                self._manager.follow_addresses()
            if self._addresses.rebind is not None:
                self._addresses.rebind()

    def memory(self) -> MemoryReport | None:
        """Bytes by captured size, None before the first capture."""
        return None if self._manager is None else self._manager.memory()

    def suspend(self) -> None:
        """Free graphs and their memory; calls run without graphs until `resume`, which captures the same ones again."""
        with self._lock:
            if self._manager is not None:
                self._manager.suspend()
            self._suspended = True

    def resume(self) -> None:
        with self._lock:
            self._suspended = False
            if self._manager is not None:
                self._manager.resume()

    def recapture(self) -> None:
        """Free the graphs, bind the module's tensors as they lie now, and capture the same graphs again."""
        with self._lock:
            suspended = self._suspended
            self.suspend()
            if self._addresses.rebind is not None:
                self._addresses.rebind()
            if not suspended:
                self.resume()

    def release(self) -> None:
        """Free graphs and buffers; the next call captures again."""
        with self._lock:
            if self._manager is not None:
                self._manager.release()
            self._manager = None

    # --- choosing --------------------------------------------------------------------------------------------------------------------

    def _dispatch(self, sizes: Mapping[str, int]) -> Dispatch:
        shape = self.grid.shape(sizes)
        if self._manager is not None and self._manager.is_running:
            return Dispatch(exact(shape), Reason.NESTED)
        if self._manager is not None and self._manager.without_graphs:
            return Dispatch(exact(shape), Reason.ADDRESS_CHANGED)
        dispatch = self.grid.dispatch(shape)
        if self._manager is not None and dispatch.descriptor in self._manager.trimmed:
            return Dispatch(exact(shape), Reason.MEMORY_BUDGET)
        if dispatch.mode is GraphMode.NONE or (self.padded and len(self.dims) == 1):
            return dispatch  # one ladder bounds its graphs by itself
        manager = self._manager
        if manager is None or manager.can_replay(dispatch.descriptor) or manager.num_captured < _MAX_GRAPHS:
            return dispatch
        return Dispatch(exact(shape), Reason.NOT_CAPTURED)

    def _available(self, dispatch: Dispatch, sizes: Mapping[str, int]) -> Dispatch:
        """The decision, or none when its graph is not to be had now."""
        descriptor = dispatch.descriptor
        if descriptor.mode is GraphMode.NONE or (self._manager is not None and self._manager.can_replay(descriptor)):
            return dispatch
        if self._suspended:
            return Dispatch(exact(self.grid.shape(sizes)), Reason.SUSPENDED)
        if not self._traffic.miss(descriptor):
            return Dispatch(exact(self.grid.shape(sizes)), Reason.CAPTURE_PENDING)
        return dispatch

    def _open_log(self) -> StepLog | None:
        if self.config.step_trace is None:
            return None
        first = self.grid.axes[0]
        ladder = () if first.ladder is None else first.ladder.sizes
        maximum = self.compiled.plan.bounds.get(first.name)
        return StepLog(self.config.step_trace, graphs=self.grid.mode, ladder=ladder, maximum=maximum, max_waste=self.grid.max_waste)

    def _sizes(self, inputs: Sequence[Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for spec, value in zip(self._specs, inputs, strict=True):
            for dim, extent in enumerate(spec.shape):
                if isinstance(extent, str):
                    sizes.setdefault(extent, int(value.shape[dim]))
        return {name: sizes.get(name, 1) for name in self.dims}  # without a dynamic dimension there is one size

    # --- running ---------------------------------------------------------------------------------------------------------------------

    def _manager_for(self, sizes: Mapping[str, int], inputs: Sequence[Any]) -> GraphManager:
        """The manager, with buffers for at least `sizes`. A larger size than ever before starts anew: addresses must not change."""
        if self._manager is None or any(size > self._capacity[name] for name, size in sizes.items()):
            with kept_state(self.compiled):
                refuse_written_inputs(self.compiled, inputs)
            self.release()  # behind that run, whose breaks may have called the module
            tops = {axis.name: axis.ladder.top if axis.padded and axis.ladder else 0 for axis in self.grid.axes}
            for name, size in sizes.items():
                self._capacity[name] = max(size, self._capacity[name], tops[name])
            device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), self.compiled.device)
            buffers = [StaticBuffer(spec, capacity=self._capacity, device=device) for spec in self._specs]
            limit = self.config.graph_memory_bytes
            self._manager = GraphManager(
                self.compiled,
                make_backend(device),
                inputs=buffers,
                dim=self.dims[0],
                counters=self.counters,
                addresses=self._addresses,
                budget=None if limit is None else MemoryBudget(limit_bytes=limit, max_waste=None),
                ranges=self._ranges,
            )
        return self._manager

    def _prepare(self, descriptor: Descriptor) -> AbstractContextManager[Any]:
        return kept_state(self.compiled)

    def _write(self, manager: GraphManager, inputs: Sequence[Any], descriptor: Descriptor) -> None:
        for buffer, value in zip(manager.inputs, inputs, strict=True):
            buffer.write(value, descriptor.sizes(self.dims[0]))
