"""The forward pass of a step: from a batch to its logits, or by replays of a decode graph to its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from rung.context import set_forward_context
from rung.graphs import Dispatch, StepTrace
from rung.runner.batch import Batch, dummy_batch, dummy_query_lens
from rung.runner.config import RunnerConfig
from rung.runner.decode import DecodeStep
from rung.runner.forward import Forward
from rung.runner.inputs import InputBuilder
from rung.runner.ops import StepOps
from rung.runner.sampler import Sampler
from rung.runner.sampler.prompt_logprobs import PromptLogprobs
from rung.runner.step_inputs import StepInputs
from rung.runner.step_trace import record_step
from rung.runner.steps import ParkedStep, PreparedStep


class StepForward:
    """Chooses how batches run, and runs them: those of plans, and dummies that belong to nobody. `forward` and `trace` may be replaced
    between steps."""

    def __init__(
        self,
        config: RunnerConfig,
        forward: Forward,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        *,
        builder: InputBuilder,
        inputs: StepInputs,
        decode: DecodeStep,
        sampler: Sampler,
        prompts: PromptLogprobs,
        ops: StepOps,
        trace: StepTrace | None,
        samples: bool,  # steps without a decode graph sample by the operations of one, where those can
    ) -> None:
        self.forward = forward
        self.trace = trace
        self._config = config
        self._compute_logits = compute_logits
        self._builder = builder
        self._buffers = builder.buffers
        self._inputs = inputs
        self._decode = decode
        self._sampler = sampler
        self._prompts = prompts
        self._ops = ops
        self._samples = samples
        self._fitting: npt.NDArray[np.int64] | None = None  # slots of the last batch that a decode graph could sample

    def run(self, batch: Batch, num_steps: int, *, in_graph: bool) -> ParkedStep:
        """Enqueue forward and logits of a batch, and `num_steps` whole steps when a graph can sample it too. `in_graph`: nothing is to
        happen between logits and tokens, so that what samples in a graph may sample this batch."""
        dispatch = self.forward.dispatch(batch)
        if self.trace is not None:
            for _ in range(num_steps):
                record_step(self.trace, batch, dispatch)
        if self.forward.advances(dispatch):
            return self._replay(batch, dispatch, num_steps, in_graph and self._fits_graph(batch))
        step = self.prepare(batch, dispatch)
        hidden = self._forward_hidden(step)
        logits, tokens = self._logits(batch, hidden), None
        if self._samples and in_graph and num_steps == 1 and self._fits_graph(batch):
            self._decode.sample(logits)
            tokens = self._decode.tokens(1, batch.num_requests)
        return ParkedStep(
            batch=batch,
            dispatch=dispatch,
            logits=logits,
            num_steps=num_steps,
            tokens=tokens,
            context=step.context,
            prompt_logprobs=self._prompts.collect(batch, hidden=hidden) if tokens is None else (),
        )

    @torch.no_grad()
    def prepare(self, batch: Batch, dispatch: Dispatch | None = None) -> PreparedStep:
        """See `ModelRunner.prepare`."""
        dispatch = dispatch or self.forward.dispatch(batch)
        return self._inputs.prepare(batch, dispatch, decode_graph=self.forward.advances(dispatch))

    @torch.no_grad()
    def dummy_run(self, query_lens: npt.NDArray[np.int32], *, decode: bool = False, dispatch: Dispatch | None = None) -> torch.Tensor:
        """See `ModelRunner.dummy_run`."""
        return self._forward_logits(self.prepare(dummy_batch(query_lens, decode=decode), dispatch))

    @contextmanager
    def dummy_context(self, dispatch: Dispatch) -> Iterator[None]:
        """See `ModelRunner.dummy_context`."""
        decode = dispatch.num_requests is not None
        if dispatch.num_requests is not None:
            lens = np.full(dispatch.num_requests, dispatch.num_tokens // dispatch.num_requests, np.int32)
        else:
            lens = dummy_query_lens(dispatch.num_tokens, self._config.max_num_requests, self._config.max_model_len)
        with (
            torch.no_grad(),
            self._inputs.kept(self._decode.state.step),
            set_forward_context(self.prepare(dummy_batch(lens, decode=decode), dispatch).context),
        ):
            yield

    def _fits_graph(self, batch: Batch) -> bool:
        """Whether the operations of a decode graph can sample the batch. What fits goes on to fit while the batch, and so its array,
        stays."""
        if batch.idx_mapping is self._fitting:
            return True
        fits = self._sampler.fits_graph(batch.idx_mapping, batch.seq_lens)
        self._fitting = batch.idx_mapping if fits else None
        return fits

    def _replay(self, batch: Batch, dispatch: Dispatch, num_steps: int, sampling: bool) -> ParkedStep:
        """Steps whose inputs, and when `sampling` also tokens, the graph makes from the slots."""
        self._builder.upload_decodes(batch)
        self._decode.begin(dispatch.num_tokens, sampling=sampling)
        with self._decode.counting():
            for _ in range(num_steps if sampling else 1):
                logits = self.forward.advance(dispatch)
                self._decode.count()
        tokens = self._decode.tokens(num_steps, batch.num_requests) if sampling else None
        return ParkedStep(
            batch=batch,
            dispatch=dispatch,
            logits=logits[: batch.num_requests],
            num_steps=num_steps,
            tokens=tokens,
            prompt_logprobs=() if sampling else self._prompts.collect(batch, logits=logits),
        )

    def _forward_logits(self, step: PreparedStep) -> torch.Tensor:
        if self.forward.advances(step.dispatch):
            return self._replay(step.batch, step.dispatch, 1, sampling=False).logits
        return self._logits(step.batch, self._forward_hidden(step))

    def _forward_hidden(self, step: PreparedStep) -> torch.Tensor:
        rows = step.dispatch.num_tokens
        return self.forward.run(step.dispatch, self._buffers.input_ids[:rows], self._buffers.positions[:rows], step.context)

    def _logits(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        if batch.uniform_query_len == 1:
            return self._compute_logits(hidden[: batch.num_requests])
        last_rows = self._ops.logits_indices(self._buffers.query_start_loc, batch.num_requests)
        return self._compute_logits(hidden[last_rows])
