"""The images of our own kernels for a runner that this process cannot run: its start-up on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rung import torch_compat
from rung.attention import attention_layers
from rung.attention.backends.triton_paged import TritonPaged
from rung.compile.compiled import CompiledFunction
from rung.counters import Counters
from rung.graphs import Dispatch, GraphMode
from rung.launch import Rehearsal, rehearse_launches
from rung.runner import RunnerConfig
from rung.runner.build import planned_descriptors
from rung.runner.decode import DecodePlan
from rung.runner.forward import EagerForward
from rung.runner.model_runner import ModelRunner
from rung.runner.ops import default_ops
from rung.runner.profile import PROFILE_BLOCKS
from rung.runner.rehearsal import rehearse
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


def build_kernels(module: nn.Module, compiled: CompiledFunction, configs: Sequence[RunnerConfig], capability: int) -> tuple[int, int]:
    """(compiled, found in the store): the images that runners of these configurations launch, with Triton's attention, whose kernels
    include those that are launched beside FlashAttention. `module` and the weights of `compiled` have no memory."""
    owner = {compiled.plan.inputs[number].local: module for number in compiled.weights}
    compiled.wrap_pieces(torch_compat.memoryless)
    compiled.rebind(owner)
    with torch_compat.fake_mode_of(module), torch.no_grad(), rehearse_launches(capability) as rehearsal:
        for config in configs:
            _rehearse(module, compiled, config)
    return rehearsal.build()


def _rehearse(module: nn.Module, compiled: CompiledFunction, config: RunnerConfig) -> None:
    device = next(module.parameters()).device
    runner = ModelRunner(
        module,
        config,
        backend=TritonPaged,
        forward=EagerForward(compiled),
        ops=default_ops(device)[0],
        num_blocks=PROFILE_BLOCKS,
        transfer=NoTransfer(device),
    )
    rehearse(runner, compiled)
    decode = DecodePlan(compiled, runner.decode)
    for descriptor in planned_descriptors(config, TritonPaged.capture_support):
        if descriptor.mode is not GraphMode.FULL:
            continue  # its breaks run as in a step without graphs
        rows = descriptor.num_tokens
        plan: Any = decode if descriptor.uniform_query_len == 1 else compiled
        with runner.dummy_context(Dispatch(descriptor)):
            plan(runner.buffers.input_ids[:rows], runner.buffers.positions[:rows])


__all__ = ["Rehearsal", "attention_layers", "build_kernels"]
