"""The device operations of a decode graph that advances itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from rung.launch import launches_early
from rung.runner.pinned import shared_tensor

if TYPE_CHECKING:
    from rung.runner.block_table import BlockTable
    from rung.runner.inputs import InputBuffers
    from rung.runner.slots import RequestSlots

MAX_STOP_IDS = 8  # stop tokens of a request that the device looks at; the host looks at all


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters by slot that a decode graph reads."""

    temperature: torch.Tensor  # float32 [R], 0: greedy
    seed: torch.Tensor  # int64 [R]
    stop_ids: torch.Tensor  # int64 [R, MAX_STOP_IDS], -1 behind the last


@dataclass(frozen=True, slots=True)
class DecodeState:
    """What decode graphs read and write besides slots and inputs; the addresses never change."""

    enabled: torch.Tensor  # int32 [1]; 0: the graph ends with the logits, somebody else samples and advances
    step: torch.Tensor  # int64 [1], replays so far
    fence: torch.Tensor  # int32 [1], for `DecodeOps.settle`
    history: torch.Tensor  # int64 [H, R], in row `step % H` the token of each batch row, -1 where none was sampled, below where it failed
    history_np: npt.NDArray[np.int64] | None  # the history as the host sees it, None where only a copy would do

    @classmethod
    def allocate(cls, num_steps: int, max_num_requests: int, device: torch.device) -> DecodeState:
        history, history_np = shared_tensor((num_steps, max_num_requests), torch.int64, device)
        return cls(
            enabled=torch.ones(1, dtype=torch.int32, device=device),
            step=torch.full((1,), -1, dtype=torch.int64, device=device),
            fence=torch.zeros(1, dtype=torch.int32, device=device),
            history=history.fill_(-1),
            history_np=history_np,
        )


class DecodeOps(ABC):
    """Builds the inputs of a batch of decodes, row i being request i, and samples, from device memory alone. The rules of `StepOps` hold:
    nothing waits, nothing is read on the host, outputs lie in persistent buffers, rows without a slot (-1) change nothing."""

    @abstractmethod
    def inputs(self, slots: RequestSlots, table: BlockTable, buffers: InputBuffers, num_rows: int) -> None:
        """Ids, positions, lengths, block table and slot mapping of the first `num_rows` rows, as the operations of `StepOps` give them
        for queries of one token: a row without a slot has one key, in block 0. Called once for each block table."""

    def settle(self, state: DecodeState) -> None:
        """Enqueue something that is launched normally, so that what was enqueued before is over when any later kernel starts, even one that
        is launched while its predecessor runs. Nothing on devices that launch no kernel so."""
        if launches_early(state.fence.device):
            state.fence.add_(1)

    @abstractmethod
    def pick(
        self,
        scores: torch.Tensor,  # [rows, vocab]
        idx_mapping: torch.Tensor,  # int64 [rows]
        seq_lens: torch.Tensor,  # int32 [rows]
        sampling: RowSampling,
        any_random: bool,  # whether some row has a temperature, which the host knows
    ) -> torch.Tensor:
        """The best token of each row, int64 [rows], at its temperature and with its noise as in `sample`, or a mark of
        `sampler.failures`; for steps that sample outside of a graph. The same bits decide."""

    @abstractmethod
    def sample(self, logits: torch.Tensor, slots: RequestSlots, buffers: InputBuffers, sampling: RowSampling, state: DecodeState) -> None:
        """Count the step, and when enabled: sample each row of logits [rows, vocab], greedy or with Gumbel noise (`noise.gumbel_noise`),
        write the tokens to the history, and advance the slots by the row's query; a prompt that is only partly computed gets no token.
        A row that samples one of its stop tokens loses its slot in `buffers.idx_mapping`, so that later replays leave it alone; so does one
        that fails (`sampler.failures`), whose mark goes to the history and token 0 to the slot."""

    def rehearsal(self, max_rows: int) -> tuple[int, ...]:
        """Numbers of rows up to `max_rows` that together take every kernel of `pick` and `sample`."""
        return ()
