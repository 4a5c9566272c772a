"""A decode step as one graph: inputs from the slots, forward, logits, sampling, and the slots advanced for the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rung.compile.bound import BoundPlan, BoundStep, StepRunner, call_steps
from rung.runner.block_table import BlockTable
from rung.runner.inputs import InputBuffers
from rung.runner.ops.base import StepOps
from rung.runner.ops.decode_base import DecodeState
from rung.runner.output import RecordedTokens
from rung.runner.sampler import Sampler
from rung.runner.slots import RequestSlots

_MIN_HISTORY = 64  # steps whose tokens are kept


class DecodeStep:
    """The device work around the forward pass of a decode graph, and the host's knowledge of what the device counted.

    A replay advances the requests by itself, so replaying K times makes K tokens of each. Tokens are read from the history, which keeps
    the last `num_steps` steps; the caller sees to it that fewer are in flight."""

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        slots: RequestSlots,
        tables: Sequence[BlockTable],
        buffers: InputBuffers,
        sampler: Sampler,
        ops: StepOps,
        steps_in_flight: int,
    ) -> None:
        self._compute_logits = compute_logits
        self._slots = slots
        self._tables = tuple(tables)
        self._buffers = buffers
        self._sampler = sampler
        self._ops = ops.decode
        self.state = DecodeState.allocate(max(_MIN_HISTORY, 2 * steps_in_flight), slots.max_num_requests, buffers.input_ids.device)
        self._sampling = True
        self._steps = 0  # replays so far

    # --- inside the graph ---

    def build_inputs(self, num_rows: int) -> None:
        """Enqueue the inputs of the batch in `buffers.idx_mapping`."""
        for table in self._tables:
            self._ops.inputs(self._slots, table, self._buffers, num_rows)
        self._ops.settle(self.state)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> logits [rows, vocab]; enqueues sampling and the slots' advance."""
        logits = self._compute_logits(hidden)
        self._ops.sample(logits, self._slots, self._buffers, self._sampler.rows, self.state)
        return logits

    # --- around replays ---

    def begin(self, num_rows: int, *, sampling: bool) -> None:
        """Before replays of a graph with `num_rows` rows. Without `sampling` they end with the logits and advance nothing."""
        self._enable(sampling)
        for table in self._tables:
            table.written(num_rows)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around what counts on the device and then here. When it fails nobody knows whether the device has counted, so it is told."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # of a device that is gone; the error that counts is on its way
                self.state.step.fill_(self._steps - 1)
            raise

    def _enable(self, sampling: bool) -> None:
        if sampling != self._sampling:
            self.state.enabled.fill_(int(sampling))
            self._sampling = sampling

    def sample(self, logits: torch.Tensor) -> None:
        """Without a graph: sample the batch in the buffers from logits [num_requests, vocab], prompts among decodes, and advance the
        slots."""
        with self.counting():
            self._enable(True)
            self._ops.sample(logits, self._slots, self._buffers, self._sampler.rows, self.state)
            self.count()

    def rehearse(self, logits: torch.Tensor) -> None:
        """Run every kernel that `sample` and decode graphs may take for up to so many rows; the batch in the buffers belongs to nobody."""
        most = logits.shape[0]
        for rows in self._ops.rehearsal(most) or (most,):
            self.sample(logits[:rows])

    def _steps_so_far(self) -> int:
        return self._steps

    def count(self) -> None:
        """After each replay, or step that was sampled as one."""
        self._steps += 1

    def tokens(self, num_steps: int, num_requests: int) -> torch.Tensor | RecordedTokens:
        """What the last `num_steps` replays sample, [num_steps, num_requests], -1 where nothing was: int64 on the device, where the host
        cannot read the history in place."""
        history, history_np = self.state.history, self.state.history_np
        first_step = self._steps - num_steps
        if history_np is not None:
            return RecordedTokens(history_np, first_step, num_steps, num_requests, self._steps_so_far)
        first = first_step % history.shape[0]
        end = first + num_steps
        return torch.cat([history[first:end, :num_requests], history[: max(0, end - history.shape[0]), :num_requests]])


class DecodePlan:
    """A model's plan between input building and sampling, for the graph manager. Inputs are the model's; the output is the logits."""

    def __init__(self, model: BoundPlan, decode: DecodeStep) -> None:
        self._model = model
        self._decode = decode
        self._inputs = BoundStep("break", "decode_inputs", self._build_inputs)
        self._sample = BoundStep("break", "decode_sample", self._finish)

    @property
    def steps(self) -> Sequence[BoundStep]:
        return (self._inputs, *self._model.steps, self._sample)

    def __call__(self, *inputs: Any) -> Any:
        return call_steps(self, *inputs)

    def run_steps(self, inputs: Sequence[Any], runner: StepRunner) -> list[Any]:
        runner(self._inputs, [inputs[0]])
        flat = self._model.run_steps(inputs, runner)
        return list(runner(self._sample, [self._model.restore(flat, inputs)]))

    def restore(self, flat: Sequence[Any], inputs: Sequence[Any]) -> Any:
        return flat[0]

    def _build_inputs(self, arguments: list[Any]) -> Sequence[Any]:
        self._decode.build_inputs(arguments[0].shape[0])
        return ()

    def _finish(self, arguments: list[Any]) -> Sequence[Any]:
        return (self._decode.finish(arguments[0]),)
