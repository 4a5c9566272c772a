"""The modes of a language model's decode step against the model without rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from rung.cli.assembly import Decoder, token_budget
from rung.cli.check_row import Check, error_of, graph_check, piece_checks, rows_of
from rung.compile.build import SplitGraph
from rung.compile.compiled import CompiledFunction
from rung.compile.retrace import traced_pieces
from rung.context import set_forward_context
from rung.graphs import GraphMode
from rung.graphs.verify import TOLERANCES, check_graph
from rung.graphs.verify_pieces import PieceError, compare_pieces
from rung.runner import EagerForward, FinishReason, Request, RunnerConfig, SamplingParams, Scheduler, build_runner
from rung.runner.build import compile_config, example_inputs
from rung.runner.graph_forward import DIM, GraphForward


class DecoderVerify:
    """One runner with both kinds of graphs. Every check repeats the same decode step, whose KV writes are the same each time."""

    padding = "padded rows belong to no request"

    def __init__(self, decoder: Decoder, sizes: Sequence[int], *, context: int, sets: int, tolerance: float | None, by_piece: bool) -> None:
        self._decoder = decoder
        self._by_piece = by_piece
        self._traced: SplitGraph | None = None
        self._sizes = sorted(sizes)
        self._context = context
        self._sets = sets
        self.device = next(decoder.module.parameters()).device
        largest = max(sizes)
        length = -(-(context + 2) // 16) * 16
        config = RunnerConfig(
            max_num_requests=largest,
            max_num_tokens=max(largest, token_budget(self.device)),
            max_model_len=length,
            num_blocks=largest * length // 16 + 1,
            graphs="full_and_piecewise",
            capture_sizes=tuple(self._sizes),
            decode_in_graph=False,  # a step that samples and advances its requests cannot be repeated
        )
        self.runner, self.start = build_runner(decoder.module, config)
        assert isinstance(self.runner.forward, GraphForward)
        self._forward = self.runner.forward
        self._eager = EagerForward(decoder.module)
        self._tolerance = TOLERANCES.get(next(decoder.module.parameters()).dtype, 1e-4) if tolerance is None else tolerance

    @torch.no_grad()
    def run(self, size: int) -> Iterator[Check]:
        """All rows for `size` requests."""
        for data in range(self._sets):
            rows = rows_of(self._sizes, size, data)
            scheduler = self._admit(rows, data)
            self.runner.execute_model(scheduler.schedule())  # the decode step, which the checks repeat while it is parked
            assert self.runner.parked is not None
            batch = self.runner.parked.batch
            fields: dict[str, Any] = {"size": size, "data": data, "rows": rows, "tolerance": self._tolerance}
            want = [self._hidden(batch, self._eager, self._eager.dispatch(batch))]
            got = [self._hidden(batch, self._forward, self._forward.dispatch(batch, best=GraphMode.NONE))]
            yield Check(mode="compiled", error=error_of(got, want), **fields)
            if self._by_piece and data == 0:
                yield from piece_checks(self._pieces(batch), **fields)
            for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
                yield self._graph(batch, mode, want, fields)
            self.runner.sample_tokens()
            self._finish(scheduler)

    def _pieces(self, batch: Any) -> list[PieceError]:
        plan = self._forward.manager.plan
        assert isinstance(plan, CompiledFunction)
        if self._traced is None:
            config = compile_config(self.runner.config.max_num_tokens)
            self._traced = traced_pieces(self._decoder.module.forward, example_inputs(self.device), config, plan.plan)
        step = self.runner.prepare(batch, self._forward.dispatch(batch, best=GraphMode.NONE))
        rows, buffers = batch.num_tokens, self.runner.buffers
        with set_forward_context(step.context):
            return compare_pieces(plan, self._traced, [buffers.input_ids[:rows], buffers.positions[:rows]])

    def _graph(self, batch: Any, mode: GraphMode, want: list[Any], fields: dict[str, Any]) -> Check:
        dispatch = self._forward.dispatch(batch, best=mode)
        descriptor = dispatch.descriptor
        if descriptor.mode is not mode:
            return Check(mode=str(mode), what=f"{descriptor.mode} is the best this attention backend allows", ran=False, **fields)

        @contextmanager
        def setup(poison: bool) -> Iterator[None]:
            step = self.runner.prepare(batch, dispatch)
            if poison:
                self._poison(batch.num_tokens, dispatch.num_tokens)
            with set_forward_context(step.context):
                yield

        def cut(flat: Sequence[Any]) -> list[Any]:
            return [value[: batch.num_tokens] if isinstance(value, torch.Tensor) else value for value in flat]

        difference = check_graph(self._forward.manager, descriptor, setup, cut)
        got = [self._hidden(batch, self._forward, dispatch)]
        return graph_check(difference, mode=str(mode), error=error_of(got, want), **fields)

    def _hidden(self, batch: Any, forward: Any, dispatch: Any) -> torch.Tensor:
        """Hidden states of the real rows."""
        step = self.runner.prepare(batch, dispatch)
        rows, buffers = dispatch.num_tokens, self.runner.buffers
        hidden: torch.Tensor = forward.run(dispatch, buffers.input_ids[:rows], buffers.positions[:rows], step.context)
        return hidden[: batch.num_tokens].clone()

    def _poison(self, start: int, end: int) -> None:
        """Valid values that belong to nobody in the padded rows."""
        for buffer in self._forward.manager.inputs:
            rows = buffer.view({DIM: end})[start:]
            rows.random_(*buffer.spec.valid, generator=torch.Generator(self.device).manual_seed(1))

    def _admit(self, count: int, seed: int) -> Scheduler:
        """A scheduler whose `count` requests have computed their prompts."""
        random, scheduler = Random(seed), Scheduler(self.runner.config, self.runner.num_blocks, self.runner.windows)
        for index in range(count):
            prompt = tuple(random.randrange(self._decoder.config.vocab_size) for _ in range(self._context))
            request = Request(
                request_id=f"verify-{seed}-{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(seed=seed),
                max_total_tokens=self.runner.config.max_model_len,
            )
            scheduler.add(request)
        while any(request.num_computed_tokens < self._context for request in scheduler.requests.values()):
            self.runner.execute_model(scheduler.schedule())
            output = self.runner.sample_tokens()
            assert output is not None
            scheduler.update(output.get_output())
        return scheduler

    def _finish(self, scheduler: Scheduler) -> None:
        for request_id in list(scheduler.requests):
            scheduler.finish(request_id, FinishReason.ABORT)
        self.runner.execute_model(scheduler.schedule())  # a plan without tokens frees the slots
