"""From logits to tokens, on the device."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from rung.runner.ops.base import StepOps
from rung.runner.ops.decode_base import MAX_STOP_IDS, RowSampling
from rung.runner.sampler.noise import gumbel_noise
from rung.runner.sampler.params import SamplingParams
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice

_TEMPERATURE, _TOP_P = range(2)
_SEED, _TOP_K = range(2)


class Sampler:
    """Parameters lie on the device by slot; greedy and random rows share a batch.

    Order: grammar mask, temperature, top-k, top-p, Gumbel. Every operation works on one row alone, so a row's result does not depend on
    the others."""

    def __init__(self, max_num_requests: int, transfer: HostToDevice, ops: StepOps) -> None:
        device = transfer.device
        self._floats = torch.zeros(2, max_num_requests, dtype=torch.float32, device=device)
        self._ints = torch.zeros(2, max_num_requests, dtype=torch.int64, device=device)
        stop_ids = torch.full((max_num_requests, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self._staged = (StagedWrites(self._floats, transfer, ops), StagedWrites(self._ints, transfer, ops))
        self._staged_stops = StagedWrites(stop_ids, transfer, ops)
        self.rows = RowSampling(temperature=self._floats[_TEMPERATURE], seed=self._ints[_SEED], stop_ids=stop_ids)
        self._random_np = np.zeros(max_num_requests, np.bool_)
        self._truncated_np = np.zeros(max_num_requests, np.bool_)

    def add(self, slot: int, params: SamplingParams, stop_token_ids: Collection[int] = ()) -> None:
        """Store the parameters of the request that enters `slot`. The device looks at the first `MAX_STOP_IDS` stop tokens."""
        floats, ints = self._staged
        floats.stage(_TEMPERATURE, slot, [params.temperature])
        floats.stage(_TOP_P, slot, [params.top_p])
        ints.stage(_SEED, slot, [params.seed or 0])
        ints.stage(_TOP_K, slot, [params.top_k])
        stops = sorted(stop_token_ids)[:MAX_STOP_IDS]
        self._staged_stops.stage(slot, 0, stops + [-1] * (MAX_STOP_IDS - len(stops)))
        self._random_np[slot] = not params.is_greedy
        self._truncated_np[slot] = not params.is_greedy and (params.top_k > 0 or params.top_p < 1)

    def apply_staged_writes(self) -> None:
        for staged in (*self._staged, self._staged_stops):
            staged.apply()

    def fits_graph(self, slots_np: npt.NDArray[np.int64]) -> bool:
        """Whether a decode graph can sample all these slots: greedy, or from all tokens at a temperature."""
        return not self._truncated_np[slots_np].any()

    def sample(
        self,
        logits: torch.Tensor,  # [rows, vocab]
        idx_mapping: torch.Tensor,  # int64 [rows], -1 for rows without a request
        slots_np: npt.NDArray[np.int64],  # the same on the host
        seq_lens: torch.Tensor,  # int32 [rows]; the new token's position
        bitmask: torch.Tensor | None = None,  # int32 [rows, ceil(vocab / 32)], bit set: the token is allowed
    ) -> torch.Tensor:
        """The sampled tokens, int64 [rows]."""
        if bitmask is not None:
            logits = logits.masked_fill(~_unpack(bitmask, logits.shape[1]), -torch.inf)
        slots = slots_np[slots_np >= 0]
        if not self._random_np[slots].any():
            return logits.argmax(dim=-1)
        rows = idx_mapping.clamp(min=0)
        temperature = torch.where(idx_mapping >= 0, self._floats[_TEMPERATURE, rows], 0).unsqueeze(1)  # [rows, 1]
        greedy = temperature == 0
        scaled = logits.float() / torch.where(greedy, 1, temperature)
        if self._truncated_np[slots].any():
            scaled = _truncate(scaled, self._ints[_TOP_K, rows], self._floats[_TOP_P, rows])
        noise = gumbel_noise(self._ints[_SEED, rows], seq_lens.to(torch.int64), logits.shape[1])
        return torch.where(greedy, logits.float(), scaled + noise).argmax(dim=-1)


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the top-k tokens and of those all but the most likely ones that together reach top-p; the best token always stays."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[1]
    rank = torch.arange(vocab, device=logits.device)
    limit = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    values = values.masked_fill(rank >= limit, -torch.inf)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of the more likely tokens
    # A row without top-p keeps all: rounding may bring the mass to 1 before the last token.
    drop = (before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    drop[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, values.masked_fill(drop, -torch.inf))


def _unpack(bitmask: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [rows, vocab] of a packed mask; bit i of word w stands for token 32 * w + i."""
    bits = torch.arange(32, device=bitmask.device, dtype=torch.int32)
    return ((bitmask.unsqueeze(2) >> bits) & 1).flatten(1)[:, :vocab].bool()
