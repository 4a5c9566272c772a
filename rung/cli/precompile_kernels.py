"""The images of our own kernels for a runner that this process cannot run: its start-up on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rung import torch_compat
from rung.attention.backends.triton_paged import TritonPaged, zero_padded_rows_triton
from rung.compile.compiled import CompiledFunction
from rung.counters import Counters
from rung.graphs import Dispatch, GraphMode
from rung.launch import rehearse_launches
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


def build_kernels(
    module: nn.Module, compiled: CompiledFunction, configs: Sequence[RunnerConfig], capability: int, *, threads: int = 1
) -> tuple[int, int]:
    """(compiled, found in the store): the images that runners of these configurations launch, with Triton's attention and beside
    FlashAttention's. `module` and the weights of `compiled` have no memory, and `compiled` cannot run after this."""
    compiled.wrap_pieces(torch_compat.memoryless)
    compiled.rebind({compiled.plan.inputs[number].local: module for number in compiled.weights})
    with torch_compat.fake_mode_of(module), torch.no_grad(), rehearse_launches(capability) as rehearsal:
        for config in configs:
            _rehearse(module, compiled, config)
    return rehearsal.build(threads)


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
    descriptors = planned_descriptors(config, TritonPaged.capture_support)
    for descriptor in [found for found in descriptors if found.mode is GraphMode.FULL and found.uniform_query_len == 1][:1]:
        rows = descriptor.num_tokens
        with runner.dummy_context(Dispatch(descriptor)):
            decode(runner.buffers.input_ids[:rows], runner.buffers.positions[:rows])
    for spec in {layer.spec for layer in runner.layers.values()}:  # FlashAttention leaves padded rows as they are
        out = torch.empty(1, spec.num_heads, spec.head_size, dtype=runner.dtype, device=device)
        zero_padded_rows_triton(out, runner.buffers.query_start_loc)
