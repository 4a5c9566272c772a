"""The profile run: what a step and the graphs take, before the KV cache gets the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rung.context import set_forward_context
from rung.graphs import Dispatch, exact
from rung.runner.batch import dummy_batch, dummy_query_lens
from rung.runner.config import RunnerConfig
from rung.runner.graph_forward import GraphForward
from rung.runner.kv_cache import free_bytes
from rung.runner.kv_groups import KVGroup, cache_bytes, most_kv_blocks
from rung.runner.memory_plan import MemoryPlan
from rung.runner.model_runner import ModelRunner

PROFILE_BLOCKS = 2  # dummy steps touch the null block alone
_AMPLE = 0.5  # a cache for every slot at its full length that takes less than this part of the free memory needs no profile


def needs_profile(config: RunnerConfig, groups: Sequence[KVGroup], device: torch.device) -> bool:
    """Whether the memory fraction decides how many blocks there are, rather than the configuration or the slots."""
    if config.num_blocks is not None or config.kv_cache_bytes is not None:
        return False
    return cache_bytes(config, groups, most_kv_blocks(config, groups)) > _AMPLE * config.memory_fraction * free_bytes(device)


def profile_memory(runner: ModelRunner, call: Callable[..., Any]) -> MemoryPlan:
    """Run the largest step, capture a few graphs, and say what is left. `runner` has a KV cache of `PROFILE_BLOCKS` blocks; the graphs are
    released again. `call(input_ids, positions)` is the model without graphs."""
    config, device, forward = runner.config, runner.device, runner.forward
    activations = _peak_activations(runner, call)
    graphs = None
    if isinstance(forward, GraphForward) and forward.descriptors:
        graphs = forward.predict_memory(runner.dummy_context)
    weights = _unique_bytes([*runner.module.parameters(), *runner.module.buffers()])
    if device.type != "cuda":
        buffers = _unique_bytes([*runner.buffers.tensors])
        return MemoryPlan(
            total_bytes=free_bytes(device) + weights + buffers,
            fraction=config.memory_fraction,
            weights_bytes=weights,
            buffers_bytes=buffers,
            graphs_bytes=graphs,
            note="activations are not measured on a CPU",
        )
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    kv_bytes = cache_bytes(config, runner.kv_groups, PROFILE_BLOCKS)  # freed before the real one
    return MemoryPlan(
        total_bytes=total,
        fraction=config.memory_fraction,
        weights_bytes=weights,
        buffers_bytes=allocated - weights - kv_bytes,
        other_bytes=total - free - allocated,
        activations_bytes=activations,
        graphs_bytes=graphs,
    )


def _peak_activations(runner: ModelRunner, call: Callable[..., Any]) -> int | None:
    """Bytes that the largest step allocates at its peak: the token budget filled, every request sampled with every option. None on a CPU,
    where torch does not count. Run twice: the first time also loads kernels and allocates workspaces, which stay."""
    device = runner.device
    if device.type != "cuda":
        return None
    _largest_step(runner, call)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _largest_step(runner, call)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@torch.no_grad()
def _largest_step(runner: ModelRunner, call: Callable[..., Any]) -> None:
    config = runner.config
    batch = dummy_batch(dummy_query_lens(config.max_num_tokens, config.max_num_requests, config.max_model_len))
    step = runner.prepare(batch, Dispatch(exact(batch.shape)))
    rows = batch.num_tokens
    with set_forward_context(step.context):
        hidden = call(runner.buffers.input_ids[:rows], runner.buffers.positions[:rows])
    last = torch.arange(config.max_num_requests, device=runner.device) % rows
    logits = runner.compute_logits(hidden[last])
    del hidden
    runner.sampler.rehearse(logits)


def _unique_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
