"""Every kernel that steps may ask for, asked for once before the first step: which one runs depends on sizes and lengths of a batch.

A kernel that is first needed in a step stalls it for a compile, or for the load of its machine code. So the owners of choices say which
batches together make all of them, and those are run as steps of nobody. On a device they load and tune; in a process that fills a store
(`rung.launch.rehearse_launches`) the same steps run on tensors without memory and name the images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rung.attention import BatchBounds
from rung.context import set_forward_context
from rung.graphs import ConfiguredMode, Dispatch, Ladder, exact
from rung.passes.kernels.tiles import row_cases
from rung.runner.batch import Batch, dummy_batch, dummy_query_lens
from rung.runner.config import RunnerConfig
from rung.runner.model_runner import ModelRunner
from rung.runner.step_trace import capture_ladder

_FEW_ROWS = 512  # the logits of a whole prompt would take gigabytes, and from here on cuBLAS computes them


def rehearse(runner: ModelRunner, call: Callable[..., Any]) -> int:
    """Run the batches that together take every kernel; returns how many. `call(input_ids, positions)` is the model without graphs. No
    request is touched. Nothing where the step's operations have no kernels of ours."""
    if not runner.ops.has_kernels:
        return 0
    batches = list(_batches(runner))
    with torch.no_grad():
        for batch, rows in batches:
            hidden = _hidden(runner, call, batch, rows)
        _operations(runner, hidden)
    return len(batches)


def _batches(runner: ModelRunner) -> Iterator[tuple[Batch, int]]:
    """With the rows that each is padded to."""
    config = runner.config
    for rows in row_cases(min(config.max_num_tokens, config.max_num_requests * config.max_model_len)):
        yield dummy_batch(dummy_query_lens(rows, config.max_num_requests, config.max_model_len)), rows
    limits, padded = attention_limits(config), padded_decodes(config)
    found: dict[BatchBounds, None] = {}
    for backend in {id(layer.backend): layer.backend for layer in runner.layers.values()}.values():
        if backend is not None:
            for within in (limits, replace(limits, num_tokens=padded, num_requests=padded, max_query_len=1)):
                found |= dict.fromkeys(backend.rehearsal(within, config.block_size, runner.dtype, runner.device))
    for bounds in found:
        lens = query_lens_of(bounds)[: config.max_num_requests]
        yield dummy_batch(lens, decode=bounds.max_query_len == 1, max_seq_len=bounds.max_seq_len), bounds.num_tokens


def padded_decodes(config: RunnerConfig) -> int:
    """Up to so many rows go through attention as decodes of one token: the batch of all requests padded to the size of a graph, or a mixed
    graph that is captured with one token a request."""
    most = config.max_num_requests
    ladder = Ladder(()) if ConfiguredMode(config.graphs) is ConfiguredMode.NONE else capture_ladder(config)
    sizes = [size for size in ladder if size <= config.max_num_tokens and (size < 2 * most or size == ladder.pad_to(most))]
    return max([most, *sizes])


def attention_limits(config: RunnerConfig) -> BatchBounds:
    return BatchBounds(
        num_tokens=config.max_num_tokens,
        num_requests=config.max_num_requests,
        max_query_len=min(config.max_num_tokens, config.max_model_len),
        max_seq_len=config.max_model_len,
    )


def query_lens_of(bounds: BatchBounds) -> npt.NDArray[np.int32]:
    """Query lengths of a batch with these bounds: the longest first, the other tokens spread over the other requests."""
    others, rest = bounds.num_requests - 1, bounds.num_tokens - bounds.max_query_len
    each, more = divmod(rest, others) if others else (0, 0)
    return np.array([bounds.max_query_len, *([each + 1] * more), *([each] * (others - more))], np.int32)


def _hidden(runner: ModelRunner, call: Callable[..., Any], batch: Batch, rows: int) -> torch.Tensor:
    """Hidden states [rows, hidden size] of a batch, whose logits are computed too."""
    step = runner.prepare(batch, Dispatch(replace(exact(batch.shape), num_tokens=rows)))
    with set_forward_context(step.context):
        hidden: torch.Tensor = call(runner.buffers.input_ids[:rows], runner.buffers.positions[:rows])
    runner.compute_logits(hidden[:_FEW_ROWS])
    return hidden


def _operations(runner: ModelRunner, hidden: torch.Tensor) -> None:
    """What a step does behind its forward pass and between steps, from the hidden states of some batch."""
    ops, device, buffers, count = runner.ops, runner.device, runner.buffers, runner.config.max_num_requests
    for dtype in (torch.int32, torch.int64, torch.float32):
        target = torch.zeros(1, 1, dtype=dtype, device=device)
        ops.scatter(target, torch.zeros(1, dtype=torch.int64, device=device), target[0])
    batch = dummy_batch(np.ones(count, np.int32), decode=True)
    runner.prepare(batch, Dispatch(exact(batch.shape)))
    rows = ops.logits_indices(buffers.query_start_loc, count) % hidden.shape[0]
    runner.sampler.rehearse_kernels(runner.compute_logits(hidden[rows]))
    runner.decode.rehearse(runner.compute_logits(hidden[rows]))
    num_sampled = ops.num_sampled(buffers.idx_mapping, buffers.seq_lens, runner.slots.prefill_len, count)
    ops.advance(runner.slots, buffers.idx_mapping, buffers.query_start_loc, rows, num_sampled)
