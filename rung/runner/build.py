"""Put a runner or an engine together from a model: attention backend, compile, KV cache, ladder, capture."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from rung import torch_compat
from rung.attention import AttentionBackend, AttentionSpec, CaptureSupport, attention_layers
from rung.attention.select import select_backend
from rung.compile.bound import BoundPlan, call_steps
from rung.compile.compiled import CompiledFunction
from rung.compile.entry import Entry
from rung.compile.report import CompileReport
from rung.config import CompileConfig
from rung.counters import Count, Counters
from rung.errors import ConfigError
from rung.graphs import CaptureReport, ConfiguredMode, make_backend, resolve_mode
from rung.graphs.capture import has_host_breaks
from rung.graphs.guard import Addresses, module_tensors
from rung.graphs.memory_budget import Steps
from rung.launch import Built, capability_of, launch_road
from rung.runner.config import RunnerConfig
from rung.runner.engine import Engine
from rung.runner.executor import InProcessExecutor
from rung.runner.forward import EagerForward, Forward
from rung.runner.graph_forward import DIM, GraphForward
from rung.runner.kernel_images import find_kernels, shadow_of
from rung.runner.kv_cache import cache_dtype, num_kv_blocks
from rung.runner.kv_groups import kv_groups
from rung.runner.memory_plan import MemoryPlan
from rung.runner.model_runner import ModelRunner
from rung.runner.ops import default_ops
from rung.runner.profile import PROFILE_BLOCKS, needs_profile, profile_memory
from rung.runner.rehearsal import rehearse
from rung.runner.scheduler import Scheduler
from rung.runner.step_plan import step_plan
from rung.runner.step_trace import open_step_trace, planned_descriptors, recorded_steps
from rung.runner.text import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class StartUp:
    """What building a runner took and chose."""

    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    attention: str = ""  # the attention backend and why
    step_ops: str = ""  # the operations that build a step's inputs, and why when they are not the fast ones
    kernel_launches: str = ""  # how our Triton kernels are launched, a `launch_road()`
    compile: CompileReport | None = None
    kernels: Built | None = None  # where the images of our own kernels came from, None where each waits for its first launch
    capture: CaptureReport | None = None
    memory: MemoryPlan | None = None  # how the KV cache was sized; None: by the configuration, or every slot fits easily

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class _Attention:
    """The chosen backend of each kind of layer, and what all of them can capture."""

    types: Mapping[AttentionSpec, type[AttentionBackend]]
    support: CaptureSupport
    why: str
    batch_invariant: bool

    def make(self, spec: AttentionSpec) -> AttentionBackend:
        return self.types[spec](spec, batch_invariant=True) if self.batch_invariant else self.types[spec](spec)


def build_runner(module: nn.Module, config: RunnerConfig, *, counters: Counters | None = None) -> tuple[ModelRunner, StartUp]:
    """A runner for `module` (see `ModelRunner`), compiled and captured as `config` says. The module lies on its device already."""
    counters = Counters() if counters is None else counters
    start = StartUp()
    _check_length(module, config)
    device, dtype = _place(module)
    attention = _choose_attention(module, config, dtype, device)
    for layer in attention_layers(module).values():
        layer.choose(attention.types[layer.spec], device)
    start.attention = attention.why
    steps = recorded_steps(config)
    start.kernel_launches = launch_road()
    trace = open_step_trace(config, attention.support)
    forward: Forward = EagerForward(module, counters)
    call: Callable[..., Any] = module
    walk: Callable[..., Any] = module
    options: dict[str, Any] = {"batch_invariant": True} if config.batch_invariant else {}
    if not config.eager:
        with start.phase("compile"):
            compiled, start.compile = compile_model(module, device, config.max_num_tokens, counters, **options)
        if device.type == "cuda" and start.compile.source == "compiled" and start.kernel_launches == "prebound":
            build_kernels(module, compiled, config, device, start, counters)
        addresses = _addresses(compiled, module, config)
        plan = step_plan(compiled, map(attention.make, attention.types), planned_descriptors(config, attention.support), dtype, device)
        forward = _graph_forward(compiled, plan, module, config, attention.support, device, counters, addresses, steps)
        call, walk = compiled, partial(call_steps, plan)
    elif config.graphs != "none":
        raise ConfigError("graphs need a compiled model, and eager=True asks for none", hint='use graphs="none", or eager=False')
    with start.phase("allocate"):
        ops, start.step_ops = default_ops(device, batch_invariant=config.batch_invariant)
        groups = kv_groups(attention_layers(module), config, cache_dtype(config, dtype))
        profiled = needs_profile(config, groups, device)
        runner = ModelRunner(
            module,
            config,
            backend=attention.make,
            forward=forward,
            ops=ops,
            counters=counters,
            trace=trace,
            num_blocks=PROFILE_BLOCKS if profiled else None,
            vocab_size=getattr(getattr(module, "config", None), "vocab_size", None),
        )
    with start.phase("load kernels"):
        rehearse(runner, walk)
    if profiled:
        with start.phase("profile"):
            start.memory = profile_memory(runner, call)
        with start.phase("allocate"):
            runner.allocate_kv_cache(num_kv_blocks(config, groups, device, start.memory))
    if isinstance(forward, GraphForward) and forward.descriptors:
        with start.phase("capture"):
            start.capture = forward.capture(runner.dummy_context, lazy=config.lazy_capture)
    return runner, start


def build_kernels(
    module: nn.Module, compiled: CompiledFunction, config: RunnerConfig, device: torch.device, start: StartUp, counters: Counters
) -> None:
    """Build at once what the first steps would build one after another. A warm start does not look: its store has the images, and the few
    of another configuration wait for their launch."""
    for layer in attention_layers(module).values():
        layer.backend = layer.kv_cache = None  # of an earlier runner
    try:
        with start.phase("find kernels"):
            rehearsal = find_kernels(shadow_of(module, device), compiled, [config], capability_of(device))
    except Exception as error:  # a module that cannot be copied, or that does more than tensor operations
        start.kernels = Built(reason=f"the start could not be rehearsed: {type(error).__name__}: {error}")
        counters.add(Count.UNFORESEEN_KERNELS)
        _log.warning("kernels are built one by one: %s", start.kernels.reason)
        return
    with start.phase("build kernels"):
        start.kernels = rehearsal.build(os.cpu_count() or 1, torch_compat.compile_workers())


def build_engine(
    module: nn.Module, config: RunnerConfig, *, tokenizer: Tokenizer | None = None, stop_token_ids: Sequence[int] = ()
) -> tuple[Engine, ModelRunner, StartUp]:
    """An engine in this process. `module` must have a `config` with `vocab_size`."""
    runner, start = build_runner(module, config)
    vocab_size: int = module.config.vocab_size  # type: ignore[union-attr, assignment]
    engine = Engine(
        InProcessExecutor(runner),
        Scheduler(config, runner.num_blocks, runner.windows, runner.counters),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
    )
    if config.freeze_heap:
        gc.collect()
        gc.freeze()
    return engine, runner, start


def compile_model(
    module: nn.Module, device: torch.device, max_num_tokens: int, counters: Counters, **options: Any
) -> tuple[CompiledFunction, CompileReport]:
    """Compile `module.forward(input_ids, positions)` with a dynamic token dimension; takes (input_ids int32, positions int64).
    `options` are further fields of the `CompileConfig`."""
    return compile_example(module, example_inputs(device), max_num_tokens, counters, **options)


def example_inputs(device: torch.device) -> dict[str, torch.Tensor]:
    """Arguments of a model's `forward`, by name."""
    return {"input_ids": torch.zeros(2, dtype=torch.int32, device=device), "positions": torch.arange(2, device=device)}


def compile_config(max_num_tokens: int, **options: Any) -> CompileConfig:
    """How a model's forward is compiled."""
    return CompileConfig(dynamic={"input_ids": {0: DIM}, "positions": {0: DIM}}, maximum=max_num_tokens, **options)


def compile_example(
    module: nn.Module, example: Mapping[str, torch.Tensor], max_num_tokens: int, counters: Counters, **options: Any
) -> tuple[CompiledFunction, CompileReport]:
    """As `compile_model`, for given `example_inputs`."""
    entry = Entry(module.forward, compile_config(max_num_tokens, **options), counters)
    with torch.no_grad():
        variant = entry.variant(example)
    return variant.compiled, variant.report


def _graph_forward(
    compiled: CompiledFunction,
    plan: BoundPlan,
    module: Any,
    config: RunnerConfig,
    support: CaptureSupport,
    device: torch.device,
    counters: Counters,
    addresses: Addresses,
    steps: Steps | None,
) -> GraphForward:
    mode = ConfiguredMode(config.graphs)
    return GraphForward(
        plan,
        make_backend(device),
        planned_descriptors(config, support),
        config,
        vocab_size=module.config.vocab_size,
        device=device,
        joined=compiled.joined,
        resolved=resolve_mode(mode, support, max(config.decode_query_lens), host_breaks=has_host_breaks(compiled)),
        addresses=addresses,
        counters=counters,
        steps=steps,
    )


def _addresses(compiled: CompiledFunction, module: nn.Module, config: RunnerConfig) -> Addresses:
    def rebind() -> None:
        compiled.rebind({compiled.plan.inputs[number].local: module for number in compiled.weights})

    return Addresses(watched=lambda: module_tensors(module), on_change=config.on_address_change, rebind=rebind)


def _choose_attention(module: nn.Module, config: RunnerConfig, dtype: torch.dtype, device: torch.device) -> _Attention:
    specs = dict.fromkeys(layer.spec for layer in attention_layers(module).values())
    fp8 = config.kv_cache_dtype == "fp8"
    options: dict[str, Any] = {"fp8_cache": fp8, "batch_invariant": config.batch_invariant}
    chosen = {spec: select_backend(spec, dtype, device, config.block_size, config.attention_backend, **options) for spec in specs}
    if not chosen:
        raise ConfigError("the module has no rung.attention.Attention layer", hint="a model runner serves attention models")
    return _Attention(
        types={spec: backend for spec, (backend, _) in chosen.items()},
        batch_invariant=config.batch_invariant,
        support=min(backend.capture_support for backend, _ in chosen.values()),
        why="; ".join(dict.fromkeys(why for _, why in chosen.values())),
    )


def _check_length(module: Any, config: RunnerConfig) -> None:
    limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, and the model has {limit} positions", hint=f"lower max_model_len to {limit}"
        )


def _place(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    first = next(module.parameters())
    return first.device, first.dtype
