"""The sizes and choices of a model runner."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Literal, get_args

from rung.config import AddressPolicy, check_sizes, is_integer
from rung.errors import ConfigError

KVCacheDtype = Literal["auto", "fp8"]
Mode = Literal["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Validated when built. The KV cache is sized by `num_blocks`, else by `kv_cache_bytes`, else by `memory_fraction`."""

    max_num_requests: int = 64  # request slots
    max_num_tokens: int = 2048  # token budget of a step, and the rows of the input buffers
    max_model_len: int = 2048  # tokens of one request, prompt and output together
    block_size: int = 16  # tokens of a KV-cache block
    num_blocks: int | None = None  # KV-cache blocks, the null block included
    kv_cache_bytes: int | None = None  # budget for the KV cache of all layers
    kv_cache_dtype: KVCacheDtype = "auto"  # that of the model; "fp8": e4m3, scaled as the layers say (`Attention.key_scale`, `value_scale`)
    memory_fraction: float = 0.9  # part of the device's memory that may be filled: weights, activations, graphs and KV cache
    prefix_cache: bool = True  # requests start behind the tokens whose blocks an earlier request with the same beginning has left
    long_prefill_chunk: int | None = None  # at most this many prompt tokens of one request in a step; None: the whole budget
    steps_in_flight: int = 2  # steps enqueued before the oldest one's tokens are read
    graphs: Mode = "none"
    decode_query_lens: tuple[int, ...] = (1,)  # tokens of a decode that full graphs are made for; (1, 4) with three drafts a request
    capture_sizes: tuple[int, ...] | None = None  # None: the default ladder
    graph_memory_bytes: int | None = None  # for pool and executables of all graphs; the least valuable sizes are left out; None: no limit
    # Full decode graphs build their inputs, sample and advance the requests themselves, and other steps sample by the same operations.
    # None: on CUDA; a CPU has no launches to save, and would draw noise for greedy rows too.
    decode_in_graph: bool | None = None
    replay_steps: int = 1  # decode steps in a row without the host, when no request waits; tokens then come in groups
    lazy_capture: bool = False  # capture each size at its first step
    capture_after: int | None = None  # capture a graph once so many steps asked for it; until then they run in the next best that exists
    capture_seconds: float = 0.05  # host time for such captures behind each step; 0: only when `capture_due` is called
    nvtx: bool = False  # NVTX ranges around pieces, breaks and replays
    max_waste: float | None = 2.0  # pad a step to at most so many times its tokens, else run it without a graph; None: no cap
    step_trace: str | Path | None = None  # `build_runner` appends a line for each step to this file (docs/trace.md)
    attention_backend: str = "auto"
    on_address_change: AddressPolicy = "raise"  # when a weight or cache that graphs read was replaced: also "recapture", or "none" (graphs)
    eager: bool = False  # run the model uncompiled
    # `build_engine` ends with `gc.freeze()`: a full collection walks all of torch, 100 to 300 ms in the midst of serving. It holds for the
    # whole process, and what exists then is never collected again, so it is for processes that serve one engine.
    freeze_heap: bool = False
    batch_invariant: bool = False  # the same bits for a request alone and in any batch; slower (docs/passes.md)

    def __post_init__(self) -> None:
        self._check_types()
        if self.graphs not in get_args(Mode):
            raise ConfigError(f"graphs must be one of {', '.join(get_args(Mode))}; got {self.graphs!r}", hint="use 'none' if unsure")
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            raise ConfigError(f"kv_cache_dtype must be 'auto' or 'fp8'; got {self.kv_cache_dtype!r}", hint="use 'auto' if unsure")
        if self.on_address_change not in get_args(AddressPolicy):
            raise ConfigError(
                f"on_address_change must be one of {', '.join(get_args(AddressPolicy))}; got {self.on_address_change!r}",
                hint="use 'raise' if unsure",
            )
        for name in ("max_num_requests", "max_num_tokens", "max_model_len", "block_size", "steps_in_flight", "replay_steps"):
            _at_least(name, getattr(self, name), 1)
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len must be at least 2 (one prompt token and one output token), got {self.max_model_len}",
                hint="leave it at the default of 2048, or give the model's context",
            )
        for name, least in (("num_blocks", 2), ("kv_cache_bytes", 1), ("long_prefill_chunk", 1), ("graph_memory_bytes", 0)):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), least)
        if self.capture_after is not None:
            _at_least("capture_after", self.capture_after, 1)
            if self.lazy_capture:
                raise ConfigError(
                    "lazy_capture and capture_after exclude each other", hint="capture_after=1 captures behind the first step"
                )
        if not self.capture_seconds >= 0:
            raise ConfigError(f"capture_seconds must not be negative, got {self.capture_seconds}", hint="0 captures only when asked to")
        check_sizes("capture_sizes", self.capture_sizes)
        for index, size in enumerate(self.capture_sizes or ()):
            if size > self.max_num_tokens:
                raise ConfigError(
                    f"capture_sizes[{index}] is {size}, above max_num_tokens ({self.max_num_tokens})",
                    hint="drop it, no step has so many tokens; or raise max_num_tokens",
                )
        if not self.decode_query_lens:
            raise ConfigError("decode_query_lens names no length", hint="leave it at (1,)")
        for length in self.decode_query_lens:
            _at_least("decode_query_lens", length, 1)
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(
                f"memory_fraction must be in (0, 1], got {self.memory_fraction}", hint="0.9 leaves a tenth of the memory free"
            )
        if self.max_waste is not None and not self.max_waste >= 1:
            raise ConfigError(f"max_waste must be at least 1, got {self.max_waste}", hint="2.0 pads a step to at most twice its tokens")
        if self.batch_invariant and self.eager:
            raise ConfigError(
                "batch_invariant needs a compiled model: eager kernels choose by the number of rows", hint="leave eager=True out"
            )
        if self.max_num_tokens < self.max_num_requests:
            raise ConfigError(
                f"max_num_tokens ({self.max_num_tokens}) is smaller than max_num_requests ({self.max_num_requests})",
                hint="a decode step needs one token for each request: raise max_num_tokens",
            )

    def _check_types(self) -> None:
        for name in ("prefix_cache", "lazy_capture", "nvtx", "eager", "freeze_heap", "batch_invariant"):
            self._is_a(name, bool, "True or False")
        self._is_a("decode_in_graph", bool | None, "True, False or None")
        self._is_a("step_trace", str | Path | None, "the path of a file, or None")
        self._is_a("attention_backend", str, "the name of a backend")
        self._is_a("decode_query_lens", tuple | list, "a tuple of lengths")
        for name in ("memory_fraction", "capture_seconds"):
            self._is_a(name, Real, "a number", but=bool)
        self._is_a("max_waste", Real | None, "a number, or None", but=bool)

    def _is_a(self, name: str, kind: type | UnionType, words: str, *, but: type | tuple[()] = ()) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind) or isinstance(value, but):
            raise ConfigError(f"{name} must be {words}, got {value!r}", hint=f"leave {name} at its default")

    @property
    def max_blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def prefill_chunk(self) -> int:
        return min(self.long_prefill_chunk or self.max_num_tokens, self.max_num_tokens)


def _at_least(name: str, value: int, least: int) -> None:
    if not is_integer(value):
        raise ConfigError(f"{name} must be an integer, got {value!r}", hint=f"leave {name} at its default")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}", hint=f"leave {name} at its default")
