"""From a name to a decoder, and from a mode to the settings of a runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rung.cli.options import QUANTISATIONS
from rung.cli.phases import Phases
from rung.errors import TokenizerError
from rung.graphs import MemoryReport
from rung.models import SHAPES, LlamaConfig, LlamaForCausalLM, Tokenizer, load_model, quantize_fp8, random_model
from rung.runner import GrammarCompiler, ModelRunner, StartUp, sampling_defaults
from rung.runner.graph_forward import GraphForward

_SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"graphs": "full_and_piecewise"},
    "eager": {"graphs": "none", "eager": True},
    "compiled": {"graphs": "none"},
    "piecewise": {"graphs": "piecewise"},
    "full": {"graphs": "full"},
}
_CPU_SIZES = (1, 2, 4, 8, 16, 32, 64)  # a capture is as slow as two steps there, and padded rows cost real time


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A language model to run. `tokenizer` is None for random weights."""

    name: str
    module: LlamaForCausalLM
    config: LlamaConfig
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # how the model wants to be sampled, as in generation_config.json


def open_decoder(name: str, dtype: torch.dtype, device: torch.device, *, shapes: bool = False, quantize: str | None = None) -> Decoder:
    """A model folder, file or name; with `shapes` also a named shape, which gets random weights. `quantize` is one of `QUANTISATIONS`.
    Raises `ModelLoadError`; `ConfigError` for layers that cannot be quantised."""
    if shapes and name in SHAPES:
        return _quantised(Decoder(name=name, module=random_model(name, dtype=dtype, device=device), config=SHAPES[name]), quantize)
    loaded = load_model(name, dtype=dtype, device=device)
    decoder = Decoder(
        name=name, module=loaded.module, config=loaded.config, tokenizer=loaded.optional_tokenizer, generation=loaded.generation
    )
    return _quantised(decoder, quantize)


def _quantised(decoder: Decoder, quantize: str | None) -> Decoder:
    if quantize is not None:
        quantize_fp8(decoder.module, QUANTISATIONS[quantize])
    return decoder


def sampling(decoder: Decoder, asked: Mapping[str, Any], json_schema: str | None) -> dict[str, Any]:
    """Arguments of `SamplingParams`: the model's own, and over them what was asked for."""
    found = {**sampling_defaults(decoder.generation), **asked}
    if json_schema is not None:
        tokenizer = decoder.tokenizer
        if tokenizer is None:
            raise TokenizerError(
                f"{decoder.name} has no tokenizer, so its tokens have no text that a schema could hold", hint="leave out --json-schema"
            )
        compiler = GrammarCompiler(tokenizer.backend, vocab_size=decoder.config.vocab_size, stop_ids=tokenizer.stop_ids)
        found["grammar"] = compiler.json_schema(json_schema)
    return found


def runner_settings(mode: str, device: torch.device) -> dict[str, Any]:
    """Fields of a `RunnerConfig` for a `--mode`. On a CPU few sizes are captured, each at its first step."""
    settings = {**_SETTINGS[mode], "max_num_tokens": token_budget(device)}
    if device.type != "cuda" and settings["graphs"] != "none":
        settings |= {"capture_sizes": _CPU_SIZES, "lazy_capture": True}
    return settings


def token_budget(device: torch.device) -> int:
    """One number for all commands: it bounds the sizes that are compiled for, so artifacts are shared."""
    return 2048 if device.type == "cuda" else 512


def add_start_up(phases: Phases, start: StartUp) -> None:
    """What building a runner took."""
    if start.compile is not None:
        phases.add_compile(start.compile.seconds)
    for name in ("find kernels", "build kernels", "allocate", "load kernels", "profile", "capture"):
        if name in start.seconds:
            phases.add(name, start.seconds[name])


def graph_memory(runner: ModelRunner) -> MemoryReport | None:
    """Bytes of the graphs that were captured so far, None without any."""
    forward = runner.forward
    report = forward.manager.memory() if isinstance(forward, GraphForward) else None
    return report if report is not None and (report.entries or report.trimmed) else None
