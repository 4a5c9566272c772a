"""Padding of a wrapped module: what its plan proves of the rows, and the run that must agree before the first padded call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rung.compile.bound import call_step
from rung.compile.compiled import CompiledFunction
from rung.counters import Count, Counters
from rung.errors import PaddingError
from rung.graphs.buffers import BufferSpec
from rung.graphs.module_io import kept_state, with_valid_range, written_weights
from rung.graphs.padding import check_padding


class ModulePadding:
    """The dimensions named in `padded` may get rows behind the real ones. Not thread-safe: the lock of the wrapped module covers it."""

    def __init__(
        self, compiled: CompiledFunction, specs: Sequence[BufferSpec], padded: frozenset[str], counters: Counters, *, allow_unproved: bool
    ) -> None:
        self.padded = padded
        self._compiled = compiled
        self._specs = tuple(specs)
        self._counters = counters
        self._allow_unproved = allow_unproved
        self._checked: set[str] = set()  # those that a run has shown to be harmless

    def refuse_unproved(self) -> None:
        """Raise `PaddingError` when the rows of a padded dimension mix, or when nothing shows that they do not."""
        for name, verdict in self._compiled.plan.rows.items():
            if verdict is None or name not in self.padded:
                continue
            if verdict.kind == "mixes":
                raise PaddingError(f"rows of {name!r} mix in {verdict}", hint="run this module at exact sizes (no pad=)")
            if not self._allow_unproved:
                raise PaddingError(
                    f"rows of {name!r} are not proved to be independent: {verdict}",
                    hint="run at exact sizes (no pad=), or pass pad_unproved=True to rely on a test run alone",
                )

    def check(self, inputs: Sequence[Any], sizes: Mapping[str, int], target: Mapping[str, int]) -> None:
        """Before a call of `sizes` is padded to `target`: raise `PaddingError` when padded rows reach real ones. Each dimension is tried
        once."""
        if any(target[name] > sizes[name] and name not in self._checked for name in self.padded):
            with kept_state(self._compiled):
                self._try(inputs, sizes, target)

    def restore_sizes(self, flat: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Sizes among the outputs are those of the caller's tensors, not of the padded buffers."""
        plan = self._compiled.plan
        owners = {plan.inputs[n]: value for n, value in zip(self._compiled.arguments, inputs, strict=True)}
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

    def _try(self, inputs: Sequence[Any], sizes: Mapping[str, int], target: Mapping[str, int]) -> None:
        compiled = self._compiled

        def run(values: list[Any]) -> list[Any]:
            with kept_state(compiled) as state:
                flat = self.restore_sizes(compiled.run_steps(values, call_step), values)
                return [*flat, *(tensor.clone() for tensor in state)]  # padded rows must not reach a buffer either

        specs = [with_valid_range(spec, value) for spec, value in zip(self._specs, inputs, strict=True)]
        names = [f"output {index}" for index in range(len(compiled.plan.outputs))]
        names += [compiled.plan.inputs[number].dotted() for number in written_weights(compiled)]
        padded = [name for name in self.padded if target[name] > sizes[name]]
        unproved = [name for name in padded if compiled.plan.rows[name] is not None]
        try:
            with torch.no_grad():
                check_padding(run, specs, list(inputs), target, names=names)
        except PaddingError as error:
            if unproved:
                raise
            raise PaddingError(
                f"the analysis proves the rows of {', '.join(map(repr, padded))} independent, but a padded run differs: {error.message}",
                hint="run at exact sizes (no pad=), and report this: one of the two is wrong",
            ) from error
        self._counters.add(Count.PADDING_CHECKS)
        if unproved:
            self._counters.add(Count.UNPROVED_PADDING, len(unproved))
        self._checked.update(padded)
