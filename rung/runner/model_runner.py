"""The model runner: from a step plan to sampled tokens, without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rung.attention import AttentionBackend, AttentionSpec, KVCache, attention_layers
from rung.context import ForwardContext, set_forward_context
from rung.counters import Counters
from rung.errors import ConfigError, StateError, StepFailedError
from rung.graphs import Dispatch, StepTrace
from rung.runner.batch import Batch, BatchBuilder, dummy_batch, dummy_query_lens
from rung.runner.block_table import BlockTable
from rung.runner.config import RunnerConfig
from rung.runner.decode import DecodeStep
from rung.runner.forward import EagerForward, Forward
from rung.runner.grammar import GrammarMask
from rung.runner.hooks import StepHooks
from rung.runner.inputs import InputBuffers, InputBuilder
from rung.runner.kv_cache import allocate_kv_caches, cache_dtype, num_kv_blocks
from rung.runner.kv_groups import kv_groups, windows_of
from rung.runner.logits import logits_of
from rung.runner.metadata import build_metadata
from rung.runner.ops import StepOps, default_ops
from rung.runner.output import EMPTY_OUTPUT, AsyncOutput, ModelRunnerOutput
from rung.runner.plan import StepPlan
from rung.runner.plan_apply import apply_plan, changes_slots
from rung.runner.plan_check import PlanChecker
from rung.runner.sampler import Sampler, StepLogprobs
from rung.runner.sampler.prompt_logprobs import PromptLogprobs
from rung.runner.slots import RequestSlots
from rung.runner.static_tensors import cache_tensors, tensors_of
from rung.runner.step_trace import record_step
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
        self.forward = forward or EagerForward(module, self.counters)
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
        self.buffers = InputBuffers.allocate(config.max_num_tokens, config.max_num_requests, self.device, self.forward.static_inputs())
        self.sampler = Sampler(self.slots, transfer, ops)
        self.compute_logits = logits_of(module, batch_invariant=config.batch_invariant)
        self.prompts = PromptLogprobs(self.compute_logits, self.slots, self.sampler)
        self._inputs = InputBuilder(self.buffers, self.slots, transfer, ops)
        self.decode = DecodeStep(
            self.compute_logits,
            self.slots,
            self.block_tables,
            self.buffers,
            self.sampler,
            ops,
            config.steps_in_flight * config.replay_steps,
        )
        if self.device.type == "cuda" if config.decode_in_graph is None else config.decode_in_graph:
            self.forward.bind_decode(self.decode)
        self._batches = BatchBuilder(self.slots)
        self._fitting: npt.NDArray[np.int64] | None = None  # slots of the last batch that a decode graph could sample
        self._checker = PlanChecker(config, self.slots, self.block_tables, self.windows, vocab_size)
        self.forward.watch(self.static_tensors)
        self.hooks = StepHooks()
        self._parked: ParkedStep | None = None
        self._plan = StepPlan()  # of the parked step
        self._trace = trace

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Replace the KV cache by one of `num_blocks` blocks (as `kv_groups.group_blocks` counts them). No request may run, and no graph
        may have been captured over the old one."""
        for layer in self.layers.values():
            layer.kv_cache = None  # the old one is freed first
        self.kv_caches = {}
        self.num_blocks = num_blocks
        self.kv_caches = allocate_kv_caches(self.layers, self.kv_groups, num_blocks, self.config, self.cache_dtype, self.device)
        self._group_blocks = [self.kv_caches[group.layers[0]].key.shape[0] for group in self.kv_groups]
        self._bind_layers(self._backend)

    @functools.cached_property
    def _copy_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

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
        self._check_bound()
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
            self._parked = self._run(self._batches.build(plan, repeated), plan.num_steps, in_graph=not plan.has_bitmask)
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
            raise StateError("a grammar mask came for a step that its graph has sampled already", hint="set has_bitmask in the step's plan")
        parked, self._parked = self._parked, None
        try:
            output = self._sample_steps(parked, mask)
            self.hooks.after_step(self._plan)
            return output
        except Exception as error:
            raise _failed(error) from error

    def _sample_steps(self, parked: ParkedStep, mask: GrammarMask | None) -> AsyncOutput:
        if parked.tokens is not None:
            self._advance_mirrors(parked.batch, parked.num_steps)
            return self._end_step(AsyncOutput(parked.batch.request_ids, parked.tokens, None, self._copy_stream))
        prompt_logprobs = parked.prompt_logprobs
        steps = [self._sample(parked, mask)]
        for _ in range(parked.num_steps - 1):
            self._advance(parked.batch, *steps[-1][:2])
            parked = self._run(self._batches.next(parked.batch), 1, in_graph=False)
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

    @torch.no_grad()
    def dummy_run(self, query_lens: npt.NDArray[np.int32], *, decode: bool = False, dispatch: Dispatch | None = None) -> torch.Tensor:
        """Run a batch that belongs to nobody on the road of a real step (profiling, warm-up); returns its logits [num_requests, vocab].
        Raises `StateError` between the two calls of a step, whose inputs it would overwrite."""
        if self._parked is not None:
            raise StateError("a dummy run came before sample_tokens()", hint="sample the parked step first")
        return self._forward_logits(self.prepare(dummy_batch(query_lens, decode=decode), dispatch))

    @contextmanager
    def dummy_context(self, dispatch: Dispatch) -> Iterator[None]:
        """The forward context of a harmless batch in `dispatch`, for warm-up and capture. What a step may have prepared in the persistent
        buffers is put back at the end."""
        decode = dispatch.num_requests is not None
        if dispatch.num_requests is not None:
            lens = np.full(dispatch.num_requests, dispatch.num_tokens // dispatch.num_requests, np.int32)
        else:
            lens = dummy_query_lens(dispatch.num_tokens, self.config.max_num_requests, self.config.max_model_len)
        persistent = [
            self.decode.state.step,
            *self.buffers.tensors,
            *(t for table in self.block_tables for t in (table.batch, table.slot_mapping)),
        ]
        with torch.no_grad():
            saved = [tensor.clone() for tensor in persistent]
            try:
                with set_forward_context(self.prepare(dummy_batch(lens, decode=decode), dispatch).context):
                    yield
            finally:
                for tensor, values in zip(persistent, saved, strict=True):
                    tensor.copy_(values)
                self._inputs.forget()  # what was uploaded last is not what the buffers hold now

    @torch.no_grad()
    def prepare(self, batch: Batch, dispatch: Dispatch | None = None) -> PreparedStep:
        """Choose the mode of a batch and enqueue its inputs, block tables and slot mapping. A capture prepares a dummy batch with the
        dispatch it wants."""
        dispatch = dispatch or self.forward.dispatch(batch)
        buffers = self.buffers
        self._inputs.upload(batch)
        self._inputs.build(dispatch.num_tokens, batch.has_prefill)
        rows = dispatch.num_requests or batch.num_requests
        may_pad = not self.forward.advances(dispatch)
        metadata = {}
        for kv_group, table in zip(self.kv_groups, self.block_tables, strict=True):
            block_table = table.gather(buffers.idx_mapping, rows)
            slot_mapping = table.map_slots(buffers.idx_mapping, buffers.query_start_loc, buffers.positions, dispatch.num_tokens)
            group = build_metadata(batch, dispatch, buffers, block_table, slot_mapping, self.config.max_model_len, may_pad=may_pad)
            metadata.update(dict.fromkeys(kv_group.layers, group))
        context = ForwardContext(
            attention_metadata=metadata,
            attention_layers=self.layers,
            mode=dispatch.mode,
            descriptor=dispatch.descriptor,
            num_actual_tokens=batch.num_tokens,
        )
        return PreparedStep(batch=batch, dispatch=dispatch, context=context)

    def _run(self, batch: Batch, num_steps: int, *, in_graph: bool) -> ParkedStep:
        """Enqueue forward and logits of a batch, and `num_steps` whole steps when a graph can sample it too."""
        dispatch = self.forward.dispatch(batch)
        if self._trace is not None:
            for _ in range(num_steps):
                record_step(self._trace, batch, dispatch)
        if self.forward.advances(dispatch):
            return self._replay(batch, dispatch, num_steps, in_graph and self._fits_graph(batch))
        step = self.prepare(batch, dispatch)
        hidden = self._forward_hidden(step)
        return ParkedStep(
            batch=batch,
            dispatch=dispatch,
            logits=self._logits(batch, hidden),
            num_steps=num_steps,
            context=step.context,
            prompt_logprobs=self.prompts.collect(batch, hidden=hidden),
        )

    def _fits_graph(self, batch: Batch) -> bool:
        """Whether a decode graph can sample the batch. What fits goes on to fit while the batch, and so its array, stays."""
        if batch.idx_mapping is self._fitting:
            return True
        fits = self.sampler.fits_graph(batch.idx_mapping, batch.seq_lens)
        self._fitting = batch.idx_mapping if fits else None
        return fits

    def _replay(self, batch: Batch, dispatch: Dispatch, num_steps: int, sampling: bool) -> ParkedStep:
        """Steps whose inputs, and when `sampling` also tokens, the graph makes from the slots."""
        self._inputs.upload_decodes(batch)
        self.decode.begin(dispatch.num_tokens, sampling=sampling)
        for _ in range(num_steps if sampling else 1):
            logits = self.forward.advance(dispatch)
            self.decode.count()
        tokens = self.decode.tokens(num_steps, batch.num_requests) if sampling else None
        return ParkedStep(
            batch=batch,
            dispatch=dispatch,
            logits=logits[: batch.num_requests],
            num_steps=num_steps,
            tokens=tokens,
            prompt_logprobs=() if sampling else self.prompts.collect(batch, logits=logits),
        )

    def _forward_logits(self, step: PreparedStep) -> torch.Tensor:
        if self.forward.advances(step.dispatch):
            return self._replay(step.batch, step.dispatch, 1, sampling=False).logits
        return self._logits(step.batch, self._forward_hidden(step))

    def _forward_hidden(self, step: PreparedStep) -> torch.Tensor:
        rows = step.dispatch.num_tokens
        return self.forward.run(step.dispatch, self.buffers.input_ids[:rows], self.buffers.positions[:rows], step.context)

    def _logits(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        last_rows = self.ops.logits_indices(self.buffers.query_start_loc, batch.num_requests)
        return self.compute_logits(hidden[last_rows])

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
        self._advance_mirrors(batch, 1)

    def _advance_mirrors(self, batch: Batch, num_steps: int) -> None:
        slots, rows = self.slots, batch.idx_mapping
        slots.num_computed_tokens_np[rows] = batch.seq_lens + (num_steps - 1)
        if batch.has_prefill:
            slots.total_len_np[rows] += (batch.seq_lens >= slots.prefill_len_np[rows]) * np.int32(num_steps)
        else:  # all known tokens are computed
            slots.total_len_np[rows] = batch.seq_lens + num_steps

    def _check_bound(self) -> None:
        name, layer = next(iter(self.layers.items()))
        if layer.kv_cache is not self.kv_caches[name]:
            raise StateError(
                "another runner was built for this module: its attention layers read that runner's KV cache now",
                hint="give each runner that lives at the same time a module of its own; a deepcopy may share the parameters",
            )

    def _bind_layers(self, backend: Callable[[AttentionSpec], AttentionBackend]) -> None:
        backends: dict[AttentionSpec, AttentionBackend] = {}
        for name, layer in self.layers.items():
            if layer.spec not in backends:
                backends[layer.spec] = backend(layer.spec)
            layer.bind(backends[layer.spec], self.kv_caches[name])
