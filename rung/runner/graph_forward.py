"""The forward pass through a compiled plan and its captured graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain

import torch

from rung.compile.bound import BoundPlan
from rung.context import ForwardContext, set_forward_context
from rung.counters import Counters
from rung.graphs import (
    BufferSpec,
    CaptureReport,
    Descriptor,
    Dispatch,
    Dispatcher,
    GraphBackend,
    GraphManager,
    GraphMode,
    Reason,
    StaticBuffer,
    exact,
)
from rung.graphs.guard import Addresses, Watched
from rung.graphs.memory import probes
from rung.graphs.memory_budget import MemoryBudget, Steps
from rung.graphs.planned import ResolvedMode
from rung.graphs.ranges import nvtx_ranges
from rung.graphs.traffic import LiveDispatcher, Traffic
from rung.graphs.wanted import Prepare, nothing_to_prepare
from rung.runner.batch import Batch
from rung.runner.config import RunnerConfig
from rung.runner.decode import DecodePlan, DecodeStep
from rung.runner.forward import Forward

DIM = "tokens"


class GraphForward(Forward):
    """FULL replays with everything in place; PIECEWISE replays inside the forward context, for the breaks; NONE runs the plan.

    `plan` takes (input_ids, positions) and returns hidden states. `addresses`: what the graphs read besides their inputs; `steps`: what
    they are for, which a memory budget asks. `joined`: what decode graphs hold of the model, where that is another walk than `plan` (see
    `step_plan`). The input buffers belong to this forward, the runner fills them. The hidden states are borrowed from the graphs until the
    next step."""

    def __init__(
        self,
        plan: BoundPlan,
        backend: GraphBackend,
        descriptors: Sequence[Descriptor],
        config: RunnerConfig,
        *,
        vocab_size: int,
        device: torch.device | str,
        joined: BoundPlan | None = None,
        resolved: ResolvedMode | None = None,
        addresses: Addresses | None = None,
        counters: Counters | None = None,
        steps: Steps | None = None,
    ) -> None:
        capacity = {DIM: config.max_num_tokens}
        self._input_ids = StaticBuffer(
            BufferSpec(name="input_ids", shape=(DIM,), dtype=torch.int32, valid=(0, vocab_size)), capacity=capacity, device=device
        )
        self._positions = StaticBuffer(
            BufferSpec(name="positions", shape=(DIM,), dtype=torch.int64, valid=(0, config.max_model_len)), capacity=capacity, device=device
        )
        self._plan = plan
        self._joined = plan if joined is None else joined
        self._prepare: Prepare = nothing_to_prepare
        self._watched: Watched = tuple  # the runner's, once there is one
        if addresses is not None:
            module = addresses.watched
            addresses = replace(
                addresses,
                watched=lambda: chain(module(), self._watched()),
                is_repeatable=lambda descriptor: not self.advances(Dispatch(descriptor)),
            )
        self.descriptors = tuple(descriptors)
        self._decode_plan: DecodePlan | None = None
        budget = None
        if config.graph_memory_bytes is not None:
            budget = MemoryBudget(limit_bytes=config.graph_memory_bytes, steps=steps, max_waste=config.max_waste)
        self.manager = GraphManager(
            plan,
            backend,
            inputs=(self._input_ids, self._positions),
            dim=DIM,
            counters=counters,
            addresses=addresses,
            plan_of=self.plan_of,
            budget=budget,
            watch_all=False,
            ranges=nvtx_ranges(config.nvtx),
        )
        self.dispatcher = LiveDispatcher(
            self.descriptors,
            lambda failed: Dispatcher(
                self.descriptors, resolved=resolved, failed=failed, trimmed=self.manager.trimmed, max_waste=config.max_waste
            ),
            self.manager,
            None if config.capture_after is None else Traffic(config.capture_after),
        )

    def static_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._input_ids.view(self._input_ids.capacity), self._positions.view(self._positions.capacity)

    def capture(self, dummy_context: Callable[[Dispatch], AbstractContextManager[None]], *, lazy: bool = False) -> CaptureReport:
        """Capture all descriptors; `dummy_context` is `ModelRunner.dummy_context`. `lazy`: each at its first step. With a budget that too
        predicts first: a step that was dispatched to a size cannot go back. With capture by traffic nothing is captured now."""
        self._prepare = lambda descriptor: dummy_context(Dispatch(descriptor))
        if lazy and self.manager.budget_bytes is not None and self.manager.memory_model is None:
            self.predict_memory(dummy_context)
        descriptors = self.descriptors if self.dispatcher.traffic is None else ()
        return self.manager.capture(descriptors, self._prepare, lazy=lazy, model=self.manager.memory_model)

    def predict_memory(self, dummy_context: Callable[[Dispatch], AbstractContextManager[None]]) -> int:
        """Bytes that the graphs of all descriptors will take, at most the budget; captures a few of them and releases them again."""
        manager = self.manager
        manager.capture(probes(self.descriptors), lambda descriptor: dummy_context(Dispatch(descriptor)))
        manager.release()
        manager.backend.reclaim()
        predicted = 0 if manager.memory_model is None else manager.memory_model.predict(self.descriptors).total_bytes
        return predicted if manager.budget_bytes is None else min(predicted, manager.budget_bytes)

    def capture_due(self, seconds: float | None = None) -> int:
        """Capture what steps asked for often enough; returns how many. A failure is a warning, and its steps stay without."""
        traffic = self.dispatcher.traffic
        if traffic is None or self.manager.is_suspended:
            return 0
        return traffic.capture_due(self._capture_one, seconds)

    def _capture_one(self, descriptor: Descriptor) -> None:
        for error in self.manager.capture([descriptor], self._prepare, on_failure="skip").failures:
            warnings.warn(error.message, RuntimeWarning, stacklevel=2)

    def suspend(self) -> None:
        self.manager.suspend()

    def resume(self) -> None:
        self.manager.resume()

    def recapture(self) -> None:
        self.manager.recapture()

    def bind_decode(self, decode: DecodeStep) -> None:
        self._decode_plan = DecodePlan(self._joined, decode)

    def advances(self, dispatch: Dispatch) -> bool:
        return self._decode_plan is not None and is_decode_graph(dispatch.descriptor)

    def advance(self, dispatch: Dispatch) -> torch.Tensor:
        logits: torch.Tensor = self.manager.run(dispatch).borrow()[0]
        return logits

    def dispatch(self, batch: Batch, *, best: GraphMode = GraphMode.FULL) -> Dispatch:
        """The mode and padded sizes for this batch, in no better mode than `best`."""
        self.manager.settle_addresses()
        if self.manager.without_graphs:
            return Dispatch(exact(batch.shape), Reason.ADDRESS_CHANGED)
        return self.dispatcher.dispatch(batch.shape, best=best)

    def watch(self, tensors: Watched) -> None:
        self._watched = tensors

    def weights_changed(self) -> None:
        self.manager.weights_changed()

    def plan_of(self, descriptor: Descriptor) -> BoundPlan:
        """What a graph of `descriptor` contains."""
        return self._decode_plan if self._decode_plan is not None and is_decode_graph(descriptor) else self._plan

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        with set_forward_context(context):
            outputs = self.manager.run(dispatch)
        hidden: torch.Tensor = self._plan.restore(outputs.borrow(), (input_ids, positions))
        return hidden


def is_decode_graph(descriptor: Descriptor) -> bool:
    """Whether a graph of it is a decode step that advances itself."""
    return descriptor.mode is GraphMode.FULL and descriptor.uniform_query_len == 1
