"""The images of our own kernels for a runner, found without a device: its start-up on tensors without memory.

For `rung precompile`, which has no device, and for a cold start, which builds all images at once instead of each at its first launch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rung import torch_compat
from rung.attention import BatchBounds
from rung.attention.backends.launch_plan import kernel_of
from rung.attention.backends.triton_paged import TritonPaged, zero_padded_rows_triton
from rung.compile.bound import call_steps
from rung.compile.compiled import CompiledFunction
from rung.counters import Counters
from rung.graphs import Descriptor, Dispatch
from rung.launch import Rehearsal, multiprocessors, rehearse_launches
from rung.runner.config import RunnerConfig
from rung.runner.decode import DecodePlan
from rung.runner.forward import EagerForward
from rung.runner.graph_forward import is_decode_graph
from rung.runner.model_runner import ModelRunner
from rung.runner.ops import default_ops
from rung.runner.profile import PROFILE_BLOCKS
from rung.runner.rehearsal import rehearse
from rung.runner.step_plan import step_plan
from rung.runner.step_trace import planned_descriptors
from rung.runner.transfer import HostToDevice


class NoTransfer(HostToDevice):
    """Copies nothing: what arrives has no memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counters = Counters()
        self._pinned = None

    def copy_into(self, source: npt.NDArray[np.generic], out: torch.Tensor) -> None:
        return None

    def to_device(self, source: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.empty(source.shape, dtype=torch.from_numpy(source).dtype, device=self.device)


def shadow_of(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of `module` whose parameters and buffers have no memory. Attention layers must not be bound to a cache."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    shadow = copy.deepcopy(module, dict(tensors))  # the copy shares them, until they are replaced
    torch_compat.without_memory(shadow, (), device)
    return shadow


class _Captured(EagerForward):
    """Steps as they are captured: inputs of decode graphs are made for such graphs."""

    def advances(self, dispatch: Dispatch) -> bool:
        return is_decode_graph(dispatch.descriptor)


def find_kernels(module: nn.Module, compiled: CompiledFunction, configs: Sequence[RunnerConfig], capability: int) -> Rehearsal:
    """What runners of these configurations launch, with Triton's attention and beside FlashAttention's. The tensors of `module`, which
    `compiled` was compiled for, have no memory (see `shadow_of`); `compiled` stays as it is."""
    owner = {compiled.plan.inputs[number].local: module for number in compiled.weights}
    pieces = compiled.pieces_through(torch_compat.memoryless)
    quiet = CompiledFunction(compiled.plan, pieces, owner)
    without_memory = torch_compat.fake_mode_of(module)
    with torch_compat.quiet_compiler(), without_memory, torch.no_grad(), rehearse_launches(capability) as rehearsal:
        for config in configs:
            _rehearse(module, quiet, config)
    return rehearsal


def _rehearse(module: nn.Module, compiled: CompiledFunction, config: RunnerConfig) -> None:
    device = next(module.parameters()).device
    runner = ModelRunner(
        module,
        config,
        backend=partial(TritonPaged, batch_invariant=config.batch_invariant),
        forward=_Captured(compiled),
        ops=default_ops(device, batch_invariant=config.batch_invariant)[0],
        num_blocks=PROFILE_BLOCKS,
        transfer=NoTransfer(device),
    )
    descriptors = planned_descriptors(config, TritonPaged.capture_support)
    backends = [layer.backend for layer in runner.layers.values() if layer.backend is not None]
    rehearse(runner, partial(call_steps, step_plan(compiled, backends, descriptors, runner.dtype, device)))
    decode = DecodePlan(compiled.joined, runner.decode)
    decodes = [found for found in descriptors if is_decode_graph(found)]
    for descriptor in _decode_graphs(runner, decodes):
        rows = descriptor.num_tokens
        with runner.dummy_context(Dispatch(descriptor)):
            decode(runner.buffers.input_ids[:rows], runner.buffers.positions[:rows])
    for spec in {layer.spec for layer in runner.layers.values()}:  # FlashAttention leaves padded rows as they are
        out = torch.empty(1, spec.num_heads, spec.head_size, dtype=runner.dtype, device=device)
        zero_padded_rows_triton(out, runner.buffers.query_start_loc)


def _decode_graphs(runner: ModelRunner, descriptors: Sequence[Descriptor]) -> list[Descriptor]:
    """Those that together take every kernel of decode graphs."""
    specs = dict.fromkeys(layer.spec for layer in runner.layers.values())
    size = {"block_size": runner.config.block_size, "processors": multiprocessors(runner.device), "element_size": runner.dtype.itemsize}
    found: dict[object, Descriptor] = {}
    for descriptor in descriptors:
        rows, longest = descriptor.num_tokens, runner.config.max_model_len
        bounds = BatchBounds(num_tokens=rows, num_requests=rows, max_query_len=1, max_seq_len=longest)
        found.setdefault(tuple(kernel_of(spec, bounds, **size) for spec in specs), descriptor)
    return list(found.values())
