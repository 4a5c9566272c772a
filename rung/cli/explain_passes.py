"""The passes' reports of a model's unique pieces, and the kernels of the code before and after them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rung.cli.assembly import open_decoder, token_budget
from rung.cli.options import resolve_dtype
from rung.cli.targets import growing_dims, is_module_target, open_module
from rung.compile.compiled import CompiledFunction
from rung.compile.entry import Entry
from rung.compile.report import CompileReport
from rung.config import CompileConfig
from rung.counters import Counters
from rung.errors import ConfigError
from rung.passes.defaults import WHOLE_PASSES, pass_names
from rung.runner.build import compile_model

_SIZES = (3, 4)
# kernels of Inductor's C++ and Triton wrappers, library calls into buffers that exist, and ops that are called as they are
_KERNELS = re.compile(
    r"^\s*(?:cpp_\w*fused\w*\(|triton_\w+\.run\(|combo_\w+\.run\(|extern_kernels\.\w+\(|(?:\w+ = )?torch\.ops\.\w+\.\w+)", re.MULTILINE
)

Compiled = tuple[CompiledFunction, CompileReport]


def explain_passes(target: str, inputs: str | None, dtype: str, device: torch.device, *, before: bool) -> list[dict[str, Any]]:
    """One entry a unique piece: its uses, matches by pass, near misses, kernels before (None when not asked for) and after."""
    run = _module(target, inputs, dtype, device) if is_module_target(target) else _decoder(target, inputs, dtype, device)
    compiled, report = run({})
    # those over the whole graph run in both: without them other pieces would stand against these
    plain = run({"without_passes": tuple(name for name in pass_names() if name not in WHOLE_PASSES)})[0] if before else None
    pieces = [_entry(index, compiled, found, plain) for index, found in enumerate(report.passes)]
    return [*([_whole(report.whole_passes)] if report.whole_passes else []), *pieces]


def _whole(report: Mapping[str, Any]) -> dict[str, Any]:
    """The passes over the graph before it was split."""
    found = {name: counts for name, counts in report.items() if name != "near_misses"}
    return {"piece": "whole graph", "uses": 1, "passes": found, "near_misses": list(report.get("near_misses", ())), "kernels": None}


def _entry(index: int, compiled: CompiledFunction, report: Mapping[str, Any], plain: CompiledFunction | None) -> dict[str, Any]:
    steps = [step for step in compiled.plan.steps if step.piece == index]
    return {
        "piece": steps[0].name,
        "uses": len(steps),
        "passes": {name: found for name, found in report.items() if name != "near_misses"},
        "near_misses": list(report.get("near_misses", ())),
        "kernels": {
            "before": None if plain is None else kernels(plain.piece_sources[index]),
            "after": kernels(compiled.piece_sources[index]),
        },
    }


def kernels(source: str) -> int:
    """How many kernels and library calls one run of a generated wrapper makes."""
    return len(_KERNELS.findall(source[source.rfind("def call(") :]))


def _module(target: str, inputs: str | None, dtype: str, device: torch.device) -> Callable[[dict[str, Any]], Compiled]:
    module, build = open_module(target, inputs, None if dtype == "auto" else resolve_dtype(dtype, device), device)
    module = module.to(device)
    dynamic = growing_dims(module, build, _SIZES, "rows")

    def run(options: dict[str, Any]) -> Compiled:
        entry = Entry(module.forward, CompileConfig(dynamic=dynamic, **options))
        args, kwargs = build(_SIZES[1])
        with torch.no_grad():
            variant = entry.prepare_call(*args, **kwargs)[0]
        return variant.compiled, variant.report

    return run


def _decoder(target: str, inputs: str | None, dtype: str, device: torch.device) -> Callable[[dict[str, Any]], Compiled]:
    if inputs is not None:
        raise ConfigError(f"--inputs goes with a module:attr target, and {target!r} is a model", hint="leave --inputs out")
    module = open_decoder(target, resolve_dtype(dtype, device), device, shapes=True).module

    def run(options: dict[str, Any]) -> Compiled:
        return compile_model(module, device, token_budget(device), Counters(), **options)

    return run
