"""What a job of `rung precompile` compiles: the same plans that `generate`, `bench` and `verify` look for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import rung
from rung import torch_compat
from rung.cli import assembly
from rung.cli.options import resolve_device, resolve_dtype
from rung.cli.precompile_jobs import Job
from rung.cli.targets import growing_dims, is_module_target, open_module
from rung.compile.compiled import CompiledFunction
from rung.compile.report import CompileReport
from rung.counters import Counters
from rung.launch import capability_of, launch_road
from rung.models import SHAPES
from rung.models.build import empty_model
from rung.models.load import model_config
from rung.runner import RunnerConfig
from rung.runner.build import compile_example, compile_model, example_inputs
from rung.runner.config import Mode
from rung.runner.kernel_images import find_kernels, shadow_of

ROWS = "rows"
_NO_KERNELS = (0, 0)


def compile_job(job: Job) -> list[dict[str, Any]]:
    """Compile, or find in the store, everything of a job; one result a plan."""
    device = resolve_device("auto" if job.place == "native" else "cuda")
    compiled = _module(job, device) if is_module_target(job.target) else _model(job, device)
    return [_result(job, what, report, kernels, seconds) for what, report, kernels, seconds in compiled]


_Kernels = tuple[int, int]  # images of our own kernels: compiled, found
_Compiled = Iterator[tuple[str, CompileReport, _Kernels, float]]


def _model(job: Job, device: torch.device) -> _Compiled:
    if job.place != "native":
        yield from _fake_model(job, device)
        return
    decoder = assembly.open_decoder(job.target, resolve_dtype(job.dtype, device), device, shapes=True)
    start = time.perf_counter()
    compiled, report = compile_model(decoder.module, device, job.maximum or assembly.token_budget(device), Counters())
    kernels = _NO_KERNELS
    if device.type == "cuda" and launch_road() == "prebound":
        kernels = _kernels(job, shadow_of(decoder.module, device), compiled, device)
    yield job.label, report, kernels, time.perf_counter() - start


def _fake_model(job: Job, device: torch.device) -> _Compiled:
    """The shapes of a model alone: no weight is read, no memory of a device is taken. Then the kernels that its runners launch."""
    config = SHAPES[job.target] if job.target in SHAPES else model_config(job.target)
    module = empty_model(config, resolve_dtype(job.dtype, device), "meta")
    example = torch_compat.without_memory(module, example_inputs(torch.device("cpu")), device)
    start = time.perf_counter()
    budget = job.maximum or assembly.token_budget(device)
    compiled, report = compile_example(module, example, budget, Counters())
    yield job.label, report, _kernels(job, module, compiled, device), time.perf_counter() - start


def _kernels(job: Job, module: nn.Module, compiled: CompiledFunction, device: torch.device) -> _Kernels:
    """Build what runners of a model without memory launch, with full graphs for decodes and with piecewise ones alone."""
    length = getattr(module, "config").max_position_embeddings  # noqa: B009 - not declared by Module
    budget = job.maximum or assembly.token_budget(device)
    settings: dict[str, Any] = {"max_num_tokens": budget, "max_model_len": length}
    modes: tuple[Mode, ...] = ("full_and_piecewise", "piecewise")
    runners = [RunnerConfig(max_num_requests=count, graphs=mode, **settings) for count in job.requests for mode in modes]
    built = find_kernels(module, compiled, runners, capability_of(device)).build(job.threads, torch_compat.compile_workers())
    return built.compiled, built.found


def _module(job: Job, device: torch.device) -> _Compiled:
    """Without graphs, as `compiled` mode wants it; and, when sizes are given, with padding up to the largest, as graphs want it."""
    dtype = None if job.dtype == "auto" else resolve_dtype(job.dtype, device)
    native = job.place == "native"
    module, build = open_module(job.target, job.inputs, dtype, device if native else torch.device("cpu"))
    module = module.to(device) if native else module
    largest = max(job.sizes, default=2)
    dynamic = growing_dims(module, build, (max(largest, 2) - 1, max(largest, 2)), ROWS)
    wanted: dict[str, dict[str, Any]] = {job.label: {"maximum": job.maximum}}
    if job.sizes:
        top = job.maximum or largest
        wanted[f"{job.label}, graphs"] = {"maximum": top, "graphs": "full", "pad": (ROWS,), "capture_sizes": job.sizes}
    args, kwargs = build(max(largest, 2))
    if not native:
        args, kwargs = torch_compat.without_memory(module, (args, kwargs), device)
    for what, options in wanted.items():
        entry = rung.wrap(module.forward, dynamic=dynamic, **options)
        start = time.perf_counter()
        with torch.no_grad():
            variant, _ = entry.prepare_call(*args, **kwargs)
        yield what, variant.report, _NO_KERNELS, time.perf_counter() - start


def _result(job: Job, what: str, report: CompileReport, kernels: _Kernels, seconds: float) -> dict[str, Any]:
    return {
        "job": what,
        "place": job.place,
        "cache": report.cache,
        "reason": report.reason,
        "plan_key": report.plan_key,
        "pieces": report.pieces,
        "unique_pieces": report.unique_pieces,
        "hit_pieces": report.unique_pieces if report.cache == "hit" else report.hit_pieces,
        "kernels": sum(kernels),
        "hit_kernels": kernels[1],
        "seconds": seconds,
        "saved_seconds": report.saved_seconds,
        "run_on_device": job.place == "native" or torch_compat.GPUS[job.place].measured,  # artifacts of this build, on such a device
    }
