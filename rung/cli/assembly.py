"""Puts the layers together: a decoder, its compiled plan and graphs, a runner, an engine. Every phase is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rung.attention import AttentionBackend, attention_layers
from rung.attention.select import select_backend
from rung.cli.ordered import OrderedPlan
from rung.cli.phases import Phases
from rung.compile.bound import BoundPlan
from rung.compile.driver import CompileReport
from rung.compile.entry import Entry
from rung.config import CompileConfig
from rung.counters import Counters
from rung.errors import ConfigError
from rung.graphs import ConfiguredMode, Ladder, make_backend, plan_descriptors
from rung.graphs.dispatch import resolve_mode
from rung.models import SHAPES, LlamaConfig, LlamaForCausalLM, Tokenizer, load_model, random_model
from rung.runner import EagerForward, Engine, Forward, InProcessExecutor, ModelRunner, RunnerConfig, Scheduler
from rung.runner.graph_forward import GraphForward

MODES = ("auto", "eager", "compiled", "piecewise", "full")
_GRAPHS = {"auto": ConfiguredMode.FULL_AND_PIECEWISE, "piecewise": ConfiguredMode.PIECEWISE, "full": ConfiguredMode.FULL}
CPU_SIZES = (1, 2, 4, 8, 16, 32, 64)  # a capture is as slow as two steps there, and padded rows cost real time


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A language model to run. `tokenizer` is None for random weights."""

    name: str
    module: LlamaForCausalLM
    config: LlamaConfig
    tokenizer: Tokenizer | None = None


def open_decoder(name: str, dtype: torch.dtype, device: torch.device, *, shapes: bool = False) -> Decoder:
    """A model folder, file or name; with `shapes` also a named shape, which gets random weights. Raises `ModelLoadError`."""
    if shapes and name in SHAPES:
        return Decoder(name=name, module=random_model(name, dtype=dtype, device=device), config=SHAPES[name])
    loaded = load_model(name, dtype=dtype, device=device)
    return Decoder(name=name, module=loaded.module, config=loaded.config, tokenizer=loaded.optional_tokenizer)


def compile_decoder(decoder: Decoder, device: torch.device, phases: Phases, counters: Counters) -> tuple[BoundPlan, CompileReport]:
    """The decoder's forward as a bound plan, compiled or loaded from the store; the module itself stays eager."""
    config = CompileConfig(dynamic={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}})
    entry = Entry(decoder.module.forward, config, counters)
    example = {
        "input_ids": torch.zeros(2, dtype=torch.int32, device=device),
        "positions": torch.zeros(2, dtype=torch.int64, device=device),
    }
    with torch.no_grad():
        variant = entry.variant(example)
    phases.add_compile(variant.report.seconds)
    return OrderedPlan(variant.compiled, tuple(example)), variant.report


def attention_backend(decoder: Decoder, config: RunnerConfig, device: torch.device, dtype: torch.dtype) -> type[AttentionBackend]:
    """The one backend that serves the decoder's layers."""
    layers = attention_layers(decoder.module)
    chosen = {select_backend(spec.spec, dtype, device, config.block_size, config.attention_backend)[0] for spec in layers.values()}
    if len(chosen) != 1:
        names = sorted(backend.name for backend in chosen)
        raise ConfigError(f"the layers of {decoder.name} want different attention backends: {names}", hint="name one attention backend")
    return chosen.pop()


def capture_ladder(config: RunnerConfig, device: torch.device, sizes: Sequence[int] | None = None) -> Ladder:
    """The documents' ladder on a GPU, a short one on a CPU, or `sizes`."""
    if sizes is not None:
        return Ladder.custom(sizes)
    if device.type == "cuda":
        return Ladder.for_requests(config.max_num_requests, max_num_tokens=config.max_num_tokens)
    return Ladder.custom(size for size in CPU_SIZES if size <= config.max_num_tokens)


def graph_forward(
    decoder: Decoder,
    plan: BoundPlan,
    config: RunnerConfig,
    mode: ConfiguredMode,
    ladder: Ladder,
    backend: type[AttentionBackend],
    counters: Counters,
) -> GraphForward:
    """The forward through graphs; nothing is captured yet."""
    device = next(decoder.module.parameters()).device
    support = backend.capture_support
    return GraphForward(
        plan,
        make_backend(device),
        plan_descriptors(ladder, mode, max_num_requests=config.max_num_requests, capture_support=support),
        config,
        vocab_size=decoder.config.vocab_size,
        device=device,
        resolved=resolve_mode(mode, support),
        counters=counters,
    )


def build_engine(
    decoder: Decoder, config: RunnerConfig, mode: str, phases: Phases, *, sizes: Sequence[int] | None = None
) -> tuple[Engine, Counters]:
    """An engine in one of `MODES`, and the counters of its steps, compile and captures. Graphs are captured now on a GPU, and each at
    its first step on a CPU."""
    device = next(decoder.module.parameters()).device
    dtype = next(decoder.module.parameters()).dtype
    counters = Counters()
    backend = attention_backend(decoder, config, device, dtype)
    forward: Forward
    if mode == "eager":
        forward = EagerForward(decoder.module, counters)
    else:
        plan, _ = compile_decoder(decoder, device, phases, counters)
        if mode == "compiled":
            forward = EagerForward(plan, counters)
        else:
            forward = graph_forward(decoder, plan, config, _GRAPHS[mode], capture_ladder(config, device, sizes), backend, counters)
    runner = ModelRunner(decoder.module, config, backend=backend, forward=forward)
    if isinstance(forward, GraphForward):
        with phases("capture"):
            forward.capture(runner.dummy_context, lazy=device.type == "cpu")
    scheduler = Scheduler(config, runner.num_blocks)
    engine = Engine(InProcessExecutor(runner), scheduler, vocab_size=decoder.config.vocab_size, tokenizer=decoder.tokenizer)
    return engine, counters
