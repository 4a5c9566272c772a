"""A call of a module that is no language model, in four modes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import rung
from rung.cli.latency import Step, Timing, measure
from rung.cli.phases import Phases
from rung.cli.steps import grown, step_rows
from rung.cli.targets import InputBuilder, Inputs, growing_dims
from rung.errors import ConfigError
from rung.graphs import Ladder

ROWS = "rows"  # the name of the dimension that the input builder's size stands for


class CallStep(Step):
    """One call; nobody reads the outputs, so a step ends when the device has finished."""

    def __init__(self, module: nn.Module, inputs: Inputs, device: torch.device, counts: Mapping[str, int] | None) -> None:
        self._module = module
        self._args, self._kwargs = inputs
        self._wait: Callable[[], object] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
        self._counts = counts
        self._before: dict[str, int] = {}

    def start(self) -> Callable[[], object]:
        self._before = dict(self._counts or {})
        with torch.inference_mode():
            self._module(*self._args, **self._kwargs)
        return self._wait

    def ran(self) -> str:
        if self._counts is None:
            return "eager"
        counts = grown(self._before, dict(self._counts))
        steps = [mode if reason == "best" else f"{mode} ({reason})" for mode, reason, _, _ in step_rows(counts)]
        if steps:
            return ", ".join(steps).replace("none", "compiled")
        return next((name for name in counts if name.startswith("eager.")), "compiled")


class ModuleBench:
    """Wraps one copy of the module for each mode."""

    def __init__(
        self,
        module: nn.Module,
        build: InputBuilder,
        sizes: Sequence[int],
        modes: Sequence[str],
        *,
        repeats: int,
        sets: int,
        device: torch.device,
    ) -> None:
        if max(sizes) < 2:
            raise ConfigError("--sizes needs a size above 1", hint="the size is what changes from call to call")
        self.device = device
        self._build = build
        self._repeats = repeats
        self._sets = sets
        module = module.to(device)
        dynamic = growing_dims(module, build, (max(sizes) - 1, max(sizes)), ROWS)
        self._modules: dict[str, nn.Module] = {}
        for mode in modes:
            self._modules[mode] = module if mode == "eager" else rung.wrap(copy.deepcopy(module), **_options(mode, dynamic, sizes))

    @property
    def phases(self) -> Phases:
        """Of all compiles and loads so far."""
        found = Phases()
        for module in self._modules.values():
            handle: Any = module.__dict__.get("rung")
            for item in [] if handle is None else handle.report():
                found.add_compile(item["seconds"])
        return found

    def run(self, size: int) -> dict[str, Timing]:
        """Timings by mode for inputs of `size`."""
        return measure(self._input_sets(size), self.device, repeats=self._repeats)

    def _input_sets(self, size: int) -> Iterator[Mapping[str, Step]]:
        for seed in range(self._sets):
            inputs = self._build(size, seed)
            yield {mode: CallStep(module, inputs, self.device, _counters(module)) for mode, module in self._modules.items()}


def _options(mode: str, dynamic: Mapping[str, Mapping[int, str]], sizes: Sequence[int]) -> dict[str, Any]:
    if mode == "compiled":
        return {"dynamic": dynamic}
    ladder = Ladder.up_to(max(sizes))
    captured = tuple(dict.fromkeys(padded for size in sizes if (padded := ladder.pad_to(size)) is not None))
    return {"dynamic": dynamic, "graphs": mode, "pad": (ROWS,), "maximum": max(sizes), "capture_sizes": captured}


def _counters(module: nn.Module) -> Mapping[str, int] | None:
    handle: Any = module.__dict__.get("rung")
    return None if handle is None else handle.counters
