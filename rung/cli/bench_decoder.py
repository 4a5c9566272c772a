"""A decode step of a language model: scheduling, inputs, forward, logits, greedy sampling, ids on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

import torch

from rung.cli import assembly
from rung.cli.assembly import Decoder
from rung.cli.latency import Step, Timing, measure
from rung.cli.phases import Phases
from rung.context import ForwardContext
from rung.errors import ConfigError
from rung.graphs import Dispatch, GraphMode, Ladder
from rung.runner import (
    EagerForward,
    FinishReason,
    Forward,
    ModelRunner,
    Request,
    RunnerConfig,
    SamplingParams,
    Scheduler,
    build_runner,
)
from rung.runner.batch import Batch
from rung.runner.config import KVCacheDtype, Mode
from rung.runner.graph_forward import GraphForward

_BEST = {"compiled": GraphMode.NONE, "piecewise": GraphMode.PIECEWISE, "full": GraphMode.FULL}


class SwitchedForward(Forward):
    """One runner's forward whose mode is chosen before each step, so that all modes see the same requests and the same memory."""

    def __init__(self, eager: EagerForward, graphs: GraphForward) -> None:
        self._eager = eager
        self._graphs = graphs
        self.mode = "compiled"
        self.ran = ""

    def static_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._graphs.static_inputs()

    def dispatch(self, batch: Batch) -> Dispatch:
        if self.mode == "eager":
            self.ran = "eager"
            return self._eager.dispatch(batch)
        dispatch = self._graphs.dispatch(batch, best=_BEST[self.mode])
        self.ran = _describe(self.mode, dispatch)
        return dispatch

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        forward = self._eager if self.mode == "eager" else self._graphs
        return forward.run(dispatch, input_ids, positions, context)

    def advances(self, dispatch: Dispatch) -> bool:
        return self.mode == "full" and self._graphs.advances(dispatch)

    def advance(self, dispatch: Dispatch) -> torch.Tensor:
        return self._graphs.advance(dispatch)


def _describe(asked: str, choice: Dispatch) -> str:
    """The mode that runs, its padded size, and why it is not the one asked for."""
    mode = choice.descriptor.mode
    if mode is GraphMode.NONE:
        return "compiled" if asked == "compiled" else f"compiled ({choice.reason})"
    return f"{mode} {choice.descriptor.num_tokens}" + ("" if mode == asked else f" ({choice.reason})")


class DecodeStep(Step):
    """The next decode step of all running requests."""

    def __init__(self, mode: str, runner: ModelRunner, scheduler: Scheduler, forward: SwitchedForward) -> None:
        self._mode = mode
        self._runner = runner
        self._scheduler = scheduler
        self._forward = forward

    def start(self) -> Callable[[], object]:
        self._forward.mode = self._mode
        self._runner.execute_model(self._scheduler.schedule())
        output = self._runner.sample_tokens()
        assert output is not None
        return lambda: self._scheduler.update(output.get_output())

    def ran(self) -> str:
        return self._forward.ran


class DecoderBench:
    """Runs the decode steps of one model; `context` tokens of prompt lie behind each request when it starts to decode."""

    def __init__(
        self,
        decoder: Decoder,
        sizes: Sequence[int],
        modes: Sequence[str],
        *,
        context: int,
        repeats: int,
        sets: int,
        max_model_len: int | None,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        self._decoder = decoder
        self._modes = tuple(modes)
        self._context = context
        self._repeats = repeats
        self._sets = sets
        self._kv_cache_dtype = kv_cache_dtype
        self._warmup = 3
        self._ids = itertools.count()
        self.phases = Phases()
        self.device = next(decoder.module.parameters()).device
        self._runner, start = build_runner(decoder.module, self._config(sizes, max_model_len))
        assembly.add_start_up(self.phases, start)
        self.attention = start.attention
        graphs = self._runner.forward
        assert isinstance(graphs, GraphForward)
        self._forward = SwitchedForward(EagerForward(decoder.module, self._runner.counters), graphs)
        self._runner.forward = self._forward  # the same input buffers: those of the graphs
        self._scheduler = Scheduler(self._runner.config, self._runner.num_blocks, self._runner.windows)
        report = graphs.manager.memory()
        self.graph_memory = report if report.entries else None

    def run(self, size: int) -> dict[str, Timing]:
        """Timings by mode for `size` requests."""
        return measure(self.input_sets(size), self.device, repeats=self._repeats, warmup=self._warmup)

    def _config(self, sizes: Sequence[int], max_model_len: int | None) -> RunnerConfig:
        largest = max(sizes)
        tokens = max(largest, assembly.token_budget(self.device))
        # Early requests decode while the last ones still compute their prompts.
        steps = len(self._modes) * (self._repeats + self._warmup) + -(-largest * self._context // tokens) + 2
        needed = -(-(self._context + steps) // 16) * 16
        limit = max_model_len or self._decoder.config.max_position_embeddings
        if needed > limit:
            raise ConfigError(
                f"{self._context} tokens of context and {steps} decode steps need {needed} tokens, the context is {limit}",
                hint="lower --context or --repeats",
            )
        # A full graph on a CPU reads as many keys as the context allows.
        length = max_model_len or (min(limit, max(needed, 2048)) if self.device.type == "cuda" else needed)
        graphs: Mode = "full_and_piecewise" if "full" in self._modes else "piecewise" if "piecewise" in self._modes else "none"
        return RunnerConfig(
            max_num_requests=largest,
            max_num_tokens=tokens,
            max_model_len=length,
            num_blocks=max(largest * needed // 16, -(-length // 16)) + 1,
            graphs=graphs,
            prefix_cache=False,
            kv_cache_dtype=self._kv_cache_dtype,
            capture_sizes=_padded_sizes(sizes),
        )

    def input_sets(self, size: int) -> Iterator[Mapping[str, Step]]:
        for seed in range(self._sets):
            self._admit(size, seed)
            yield {mode: DecodeStep(mode, self._runner, self._scheduler, self._forward) for mode in self._modes}
            self._finish()

    def _admit(self, size: int, seed: int) -> None:
        """Let `size` requests compute their prompts."""
        random = Random(seed)
        vocab = self._decoder.config.vocab_size
        for _ in range(size):
            prompt = tuple(random.randrange(vocab) for _ in range(self._context))
            request = Request(
                request_id=f"bench-{next(self._ids)}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(seed=seed),
                max_total_tokens=self._runner.config.max_model_len,
            )
            self._scheduler.add(request)
        self._forward.mode = self._modes[0]
        while any(request.num_computed_tokens < self._context for request in self._scheduler.requests.values()):
            self._runner.execute_model(self._scheduler.schedule())
            output = self._runner.sample_tokens()
            assert output is not None
            self._scheduler.update(output.get_output())

    def _finish(self) -> None:
        for request_id in list(self._scheduler.requests):
            self._scheduler.finish(request_id, FinishReason.ABORT)
        self._runner.execute_model(self._scheduler.schedule())  # a plan without tokens frees the slots


def _padded_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those sizes of the default ladder that the benchmarked sizes are padded to."""
    ladder = Ladder.up_to(max(sizes))
    return tuple(dict.fromkeys(padded for size in sizes if (padded := ladder.pad_to(size)) is not None))
