"""The model runner: from a step plan to sampled tokens, without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rung.attention import AttentionBackend, AttentionSpec, KVCache, attention_layers
from rung.counters import Counters
from rung.errors import ConfigError, StateError, StepFailedError
from rung.graphs import Dispatch, StepTrace
from rung.runner.batch import Batch, BatchBuilder, advance_mirrors
from rung.runner.block_table import BlockTable
from rung.runner.config import RunnerConfig
from rung.runner.decode import DecodeStep
from rung.runner.forward import EagerForward, Forward
from rung.runner.grammar import GrammarMask
from rung.runner.hooks import StepHooks
from rung.runner.inputs import InputBuffers, InputBuilder
from rung.runner.kv_cache import allocate_kv_caches, bind_layers, cache_dtype, check_bound, num_kv_blocks
from rung.runner.kv_groups import kv_groups, windows_of
from rung.runner.logits import logits_of
from rung.runner.ops import StepOps, default_ops
from rung.runner.output import EMPTY_OUTPUT, AsyncOutput, ModelRunnerOutput
from rung.runner.plan import StepPlan
from rung.runner.plan_apply import apply_plan, changes_slots
from rung.runner.plan_check import PlanChecker
from rung.runner.sampler import Sampler, StepLogprobs
from rung.runner.sampler.prompt_logprobs import PromptLogprobs
from rung.runner.slots import RequestSlots
from rung.runner.static_tensors import cache_tensors, tensors_of
from rung.runner.step_forward import StepForward
from rung.runner.step_inputs import StepInputs
from rung.runner.steps import ParkedStep, PreparedStep
from rung.runner.transfer import HostToDevice


def _failed(error: Exception) -> StepFailedError:
    return StepFailedError(
        f"a step failed: {type(error).__name__}: {error}", hint="finish the plan's requests; the runner takes plans for all others"
    )


class ModelRunner:
    """Runs `module(input_ids [T] int32, positions [T] int64) -> hidden [T, hidden]` and `module.compute_logits(hidden [N, hidden])`.

    One step is two calls: `execute_model(plan)` applies the plan and enqueues forward and logits, `sample_tokens(mask)` samples and
    advances the slots. Between them a caller may build a grammar mask. The runner owns slots, block tables (one for each of
    `kv_groups`), input buffers and KV cache; it binds the attention layers of `module` to them. `num_blocks` overrides the configured size
    of the KV cache; `vocab_size` lets plans be checked for token ids that the model does not have. `trace` gets the steps of requests, not
    the dummy ones. Not thread-safe: one caller drives it."""

    def __init__(
        self,
        module: nn.Module,
        config: RunnerConfig,
        *,
        backend: Callable[[AttentionSpec], AttentionBackend],
        forward: Forward | None = None,
        ops: StepOps | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        counters: Counters | None = None,
        trace: StepTrace | None = None,
        num_blocks: int | None = None,
        vocab_size: int | None = None,
        transfer: HostToDevice | None = None,
    ) -> None:
        first = next(module.parameters())
        self.module = module
        self.config = config
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.cache_dtype = cache_dtype(config, self.dtype)
        self.counters = Counters() if counters is None else counters
        forward = forward or EagerForward(module, self.counters)
        self.layers = attention_layers(module)
        if not self.layers:
            raise ConfigError("the module has no rung.attention.Attention layer", hint="a model runner serves attention models")
        self._backend = backend
        self.kv_groups = kv_groups(self.layers, config, self.cache_dtype)
        if num_blocks is None:
            num_blocks = num_kv_blocks(config, self.kv_groups, self.device)
        self.kv_caches: dict[str, KVCache] = {}
        self.allocate_kv_cache(num_blocks)

        self.ops = ops = ops or default_ops(self.device)[0]
        transfer = transfer or HostToDevice(self.device, self.counters)
        self.slots = RequestSlots(config.max_num_requests, config.max_model_len, transfer, ops)
        self.block_tables = tuple(
            BlockTable(config.max_num_requests, config.max_blocks_per_request, config.max_num_tokens, config.block_size, transfer, ops)
            for _ in self.kv_groups
        )
        self.buffers = InputBuffers.allocate(config.max_num_tokens, config.max_num_requests, self.device, forward.static_inputs())
        self.sampler = Sampler(self.slots, transfer, ops)
        self.compute_logits = logits_of(module, batch_invariant=config.batch_invariant)
        self.prompts = PromptLogprobs(self.compute_logits, self.slots, self.sampler)
        self._inputs = builder = InputBuilder(self.buffers, self.slots, transfer, ops)
        self.decode = DecodeStep(
            self.compute_logits,
            self.slots,
            self.block_tables,
            self.buffers,
            self.sampler,
            ops,
            config.steps_in_flight * config.replay_steps,
        )
        samples = self.device.type == "cuda" if config.decode_in_graph is None else config.decode_in_graph
        if samples:
            forward.bind_decode(self.decode)
        self._step = StepForward(
            config,
            forward,
            self.compute_logits,
            builder=builder,
            inputs=StepInputs(builder, self.layers, self.kv_groups, self.block_tables, config.max_model_len, self.counters),
            decode=self.decode,
            sampler=self.sampler,
            prompts=self.prompts,
            ops=ops,
            trace=trace,
            samples=samples,
        )
        self._batches = BatchBuilder(self.slots)
        self._checker = PlanChecker(config, self.slots, self.block_tables, self.windows, vocab_size)
        forward.watch(self.static_tensors)
        self.hooks = StepHooks()
        self._parked: ParkedStep | None = None
        self._plan = StepPlan()  # of the parked step

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Replace the KV cache by one of `num_blocks` blocks (as `kv_groups.group_blocks` counts them). No request may run, and no graph
        may have been captured over the old one."""
        for layer in self.layers.values():
            layer.kv_cache = None  # the old one is freed first
        self.kv_caches = {}
        self.num_blocks = num_blocks
        self.kv_caches = allocate_kv_caches(self.layers, self.kv_groups, num_blocks, self.config, self.cache_dtype, self.device)
        self._group_blocks = [self.kv_caches[group.layers[0]].key.shape[0] for group in self.kv_groups]
        bind_layers(self.layers, self.kv_caches, self._backend)

    @functools.cached_property
    def _copy_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def forward(self) -> Forward:
        """How forward passes run; it may be replaced between steps."""
        return self._step.forward

    @forward.setter
    def forward(self, forward: Forward) -> None:
        self._step.forward = forward

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each KV-cache group, None for full attention; the scheduler has to know."""
        return windows_of(self.kv_groups)

    @property
    def parked(self) -> ParkedStep | None:
        """The step between the two calls; its batch order is the row order of a grammar mask."""
        return self._parked

    @torch.no_grad()
    def execute_model(self, plan: StepPlan) -> ModelRunnerOutput | None:
        """Apply the plan and enqueue its forward pass. None: call `sample_tokens` next. A plan without tokens is applied and gives an empty
        output. Raises `StateError` when the last step was not sampled; a plan that is refused changes nothing. Raises `StepFailedError`
        when the plan was applied and its step failed: nothing is parked, and the requests of the plan can only be finished."""
        if self._parked is not None:
            raise StateError(
                "State error: sample_tokens() must be called after execute_model() returns None.",
                hint="every execute_model that returns None is followed by one sample_tokens",
            )
        check_bound(self.layers, self.kv_caches)
        changes = changes_slots(plan)
        repeated = None if changes else self._batches.repeated(plan)
        self._checker.check(plan, self._group_blocks, repeated)
        try:
            if changes:
                self._inputs.forget()
                self._batches.forget()
            apply_plan(plan, self.slots, self.sampler, self.block_tables)
            if not plan.num_scheduled_tokens:
                self.hooks.no_work(plan)
                return EMPTY_OUTPUT
            self._plan = plan
            self.hooks.before_forward(plan)
            self._parked = self._step.run(self._batches.build(plan, repeated), plan.num_steps, in_graph=not plan.has_bitmask)
        except Exception as error:
            raise _failed(error) from error
        return None

    @torch.no_grad()
    def sample_tokens(self, mask: GrammarMask | None = None) -> AsyncOutput | None:
        """Sample the parked step and advance its requests; those in `mask` sample only what it allows. Returns None when nothing is
        parked, raises `StepFailedError` as `execute_model` does. A row that cannot be sampled is reported in the output, alone."""
        if self._parked is None:
            return None
        if mask is not None and self._parked.tokens is not None:
            raise StateError("a grammar mask came for a step that was sampled already", hint="set has_bitmask in the step's plan")
        parked, self._parked = self._parked, None
        try:
            output = self._sample_steps(parked, mask)
            self.hooks.after_step(self._plan)
            return output
        except Exception as error:
            raise _failed(error) from error

    def _sample_steps(self, parked: ParkedStep, mask: GrammarMask | None) -> AsyncOutput:
        if parked.tokens is not None:
            advance_mirrors(self.slots, parked.batch, parked.num_steps)
            return self._end_step(AsyncOutput(parked.batch.request_ids, parked.tokens, None, self._copy_stream))
        prompt_logprobs = parked.prompt_logprobs
        steps = [self._sample(parked, mask)]
        for _ in range(parked.num_steps - 1):
            self._advance(parked.batch, *steps[-1][:2])
            parked = self._step.run(self._batches.next(parked.batch), 1, in_graph=False)
            steps.append(self._sample(parked, None))
        # The copy starts before the state is advanced, so that it does not wait for it.
        columns = list(zip(*steps, strict=True))[:2]
        sampled, counts = (torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0) for rows in columns)
        logprobs = [step[2] for step in steps if step[2] is not None]
        output = AsyncOutput(parked.batch.request_ids, sampled, counts, self._copy_stream, logprobs, prompt_logprobs)
        self._advance(parked.batch, *steps[-1][:2])
        return self._end_step(output)

    def _end_step(self, output: AsyncOutput) -> AsyncOutput:
        """Everything of the step is enqueued and nothing is parked: the place for captures."""
        if self.config.capture_after is not None and self.config.capture_seconds:
            self.forward.capture_due(self.config.capture_seconds)
        return output

    def capture_due(self, seconds: float | None = None) -> int:
        """Capture graphs that steps asked for often enough (`RunnerConfig.capture_after`), about `seconds` long; returns how many. For
        moments without work."""
        self._check_between_steps("capture_due")
        return self.forward.capture_due(seconds)

    def suspend_graphs(self) -> None:
        """Free the graphs and their memory; steps run without graphs until `resume_graphs`."""
        self._check_between_steps("suspend_graphs")
        self.forward.suspend()

    def resume_graphs(self) -> None:
        """Capture again what `suspend_graphs` freed."""
        self._check_between_steps("resume_graphs")
        self.forward.resume()

    def recapture_graphs(self) -> None:
        """Capture the same graphs again, after addresses that they read have changed."""
        self._check_between_steps("recapture_graphs")
        self.forward.recapture()

    def _check_between_steps(self, call: str) -> None:
        if self._parked is not None:
            raise StateError(f"{call}() came before sample_tokens()", hint="sample the parked step first")

    def weights_changed(self) -> None:
        """Say that parameters or buffers of the module were replaced: all addresses are checked now, and `RunnerConfig.on_address_change`
        is followed (it may raise `AddressChangedError`). Values written in place need no call."""
        self.forward.weights_changed()

    def static_tensors(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What captured steps read besides the module's own tensors, by name: KV cache and the buffers of the step."""
        yield from cache_tensors(self.layers)
        yield from tensors_of("input buffer", self.buffers)
        yield from tensors_of("slots", self.slots)
        yield from tensors_of("decode state", self.decode.state)
        for index, table in enumerate(self.block_tables):
            yield from tensors_of(f"block table {index}", table)

    def prepare(self, batch: Batch, dispatch: Dispatch | None = None) -> PreparedStep:
        """Choose the mode of a batch and enqueue its inputs, block tables and slot mapping. A capture prepares a dummy batch with the
        dispatch it wants."""
        return self._step.prepare(batch, dispatch)

    def dummy_run(self, query_lens: npt.NDArray[np.int32], *, decode: bool = False, dispatch: Dispatch | None = None) -> torch.Tensor:
        """Run a batch that belongs to nobody on the road of a real step (profiling, warm-up); returns its logits [num_requests, vocab].
        Raises `StateError` between the two calls of a step, whose inputs it would overwrite."""
        if self._parked is not None:
            raise StateError("a dummy run came before sample_tokens()", hint="sample the parked step first")
        return self._step.dummy_run(query_lens, decode=decode, dispatch=dispatch)

    def dummy_context(self, dispatch: Dispatch) -> AbstractContextManager[None]:
        """The forward context of a harmless batch in `dispatch`, for warm-up and capture. What a step may have prepared in the persistent
        buffers is put back at the end."""
        return self._step.dummy_context(dispatch)

    def _sample(self, parked: ParkedStep, mask: GrammarMask | None) -> tuple[torch.Tensor, torch.Tensor, StepLogprobs | None]:
        """The sampled tokens of a batch, int64 [num_requests], or marks of failures; how many of each row count, int32 [num_requests]."""
        batch = parked.batch
        count = batch.num_requests
        idx_mapping, seq_lens = self.buffers.idx_mapping[:count], self.buffers.seq_lens[:count]
        sampled = self.sampler.sample(parked.logits, idx_mapping, seq_lens, batch, mask)
        return sampled.tokens, self.ops.num_sampled(idx_mapping, seq_lens, self.slots.prefill_len, count), sampled.logprobs

    def _advance(self, batch: Batch, sampled: torch.Tensor, num_sampled: torch.Tensor) -> None:
        tokens = sampled.clamp(min=0)  # a row that failed goes on with some token until the host has heard of it
        self.ops.advance(self.slots, self.buffers.idx_mapping, self.buffers.query_start_loc, tokens, num_sampled)
        self.sampler.penalties.count(self.buffers.idx_mapping[: batch.num_requests], tokens, num_sampled)
        advance_mirrors(self.slots, batch, 1)
