"""From logits to tokens, on the device."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rung.runner.batch import Batch
from rung.runner.grammar.base import GrammarMask
from rung.runner.ops.base import StepOps
from rung.runner.ops.decode_base import MAX_STOP_IDS, RowSampling
from rung.runner.ops.sample_base import RowFilters
from rung.runner.sampler.bad_words import BadWords
from rung.runner.sampler.failures import mark_hidden_nans
from rung.runner.sampler.logprobs import LogprobRows, LogprobTensors, StepLogprobs
from rung.runner.sampler.params import SamplingParams
from rung.runner.sampler.penalties import Penalties
from rung.runner.sampler.processor import Entry, Processor, Rows
from rung.runner.sampler.token_processors import AllowedTokens, LogitBias, MinTokens
from rung.runner.slots import RequestSlots
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice

_TEMPERATURE, _TOP_P, _LOG_MIN_P = range(3)
_SEED, _TOP_K, _PROMPT_LEN = range(3)

# What a request needs, as bits of a number by slot; those of the processors follow.
_RANDOM, _TRUNCATED, _HAS_MIN_P, _LOGPROBS, _PROMPT_LOGPROBS = (1 << bit for bit in range(5))
_FIRST_PROCESSOR = 5


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step, on the device."""

    tokens: torch.Tensor  # int64 [rows]; below -1 where the row failed, see `failures`
    logprobs: StepLogprobs | None = None  # of the requests that asked for them


class Sampler:
    """Parameters lie on the device by slot; greedy and random rows share a batch.

    Order: grammar mask, allowed ids and minimum length, bias, penalties, bad words, temperature, min-p, top-k, top-p, Gumbel. Every
    operation works on one row alone, so a row's result does not depend on the others. What no request of a batch needs is skipped, for
    the price of one look at a number by slot; the logits are copied only when some row's change before the temperature."""

    def __init__(self, slots: RequestSlots, transfer: HostToDevice, ops: StepOps) -> None:
        device, count = transfer.device, slots.max_num_requests
        self._slots = slots
        self._transfer = transfer
        self._ops = ops
        self._floats = torch.zeros(3, count, dtype=torch.float32, device=device)
        self._ints = torch.zeros(3, count, dtype=torch.int64, device=device)
        stop_ids = torch.full((count, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self._staged = (StagedWrites(self._floats, transfer, ops), StagedWrites(self._ints, transfer, ops))
        self._staged_stops = StagedWrites(stop_ids, transfer, ops)
        self.rows = RowSampling(temperature=self._floats[_TEMPERATURE], seed=self._ints[_SEED], stop_ids=stop_ids)
        self._filters = RowFilters(
            temperature=self._floats[_TEMPERATURE], log_min_p=self._floats[_LOG_MIN_P], top_k=self._ints[_TOP_K], top_p=self._floats[_TOP_P]
        )
        self.penalties = Penalties(slots.all_token_ids, transfer, ops)
        self._min_tokens = MinTokens(count, transfer, ops)
        self._processors: tuple[Processor, ...] = (
            AllowedTokens(count, transfer, ops),
            self._min_tokens,
            LogitBias(count, transfer, ops),
            self.penalties,
            BadWords(slots.all_token_ids, transfer, ops),
        )
        bits = [1 << (_FIRST_PROCESSOR + index) for index in range(len(self._processors))]
        self._bits = dict(zip(self._processors, bits, strict=True))
        self._processed = sum(bits)
        self._needs_np = np.zeros(count, np.int64)
        self._min_len_np = np.zeros(count, np.int64)  # tokens from which on a request may end
        self._num_logprobs_np = np.zeros(count, np.int64)
        self._num_prompt_logprobs_np = np.zeros(count, np.int64)

    def add(
        self, slot: int, params: SamplingParams, stop_token_ids: Collection[int] = (), *, prompt_len: int = 0, num_tokens: int = 0
    ) -> None:
        """Store the parameters of the request that enters `slot` with so many tokens. Decode graphs look at the first `MAX_STOP_IDS` stop
        tokens."""
        floats, ints = self._staged
        floats.stage(_TEMPERATURE, slot, [params.temperature])
        floats.stage(_TOP_P, slot, [params.top_p])
        floats.stage(_LOG_MIN_P, slot, [math.log(params.min_p) if params.min_p > 0 else -math.inf])
        ints.stage(_SEED, slot, [params.seed or 0])
        ints.stage(_TOP_K, slot, [params.top_k])
        ints.stage(_PROMPT_LEN, slot, [prompt_len])
        stops = sorted(stop_token_ids)[:MAX_STOP_IDS]
        self._staged_stops.stage(slot, 0, stops + [-1] * (MAX_STOP_IDS - len(stops)))
        entry = Entry(slot=slot, params=params, stop_token_ids=stop_token_ids, prompt_len=prompt_len, num_tokens=num_tokens)
        for processor in self._processors:
            processor.add(entry)
        self._min_len_np[slot] = prompt_len + params.min_tokens
        self._num_logprobs_np[slot] = params.logprobs or 0
        self._num_prompt_logprobs_np[slot] = params.prompt_logprobs or 0
        self._needs_np[slot] = self._needs_of(params)

    def apply_staged_writes(self) -> None:
        for staged in (*self._staged, self._staged_stops):
            staged.apply()
        for processor in self._processors:
            processor.apply_staged_writes()

    def fits_graph(self, slots_np: npt.NDArray[np.int64], seq_lens_np: npt.NDArray[np.int32]) -> bool:
        """Whether a decode graph can sample all these slots: greedy, or from all tokens at a temperature, and no logprobs."""
        needs = self._needs(slots_np)
        if needs & self._bits[self._min_tokens]:
            # The host sees when a request has its minimum; from then on it is like any other.
            long = slots_np[seq_lens_np >= self._min_len_np[slots_np]]
            self._needs_np[long] &= ~self._bits[self._min_tokens]
            needs = self._needs(slots_np)
        return not needs & ~_RANDOM

    def sample(
        self,
        logits: torch.Tensor,  # [rows, vocab]
        idx_mapping: torch.Tensor,  # int64 [rows], -1 for rows without a request
        seq_lens: torch.Tensor,  # int32 [rows]; the new token's position
        batch: Batch,  # the same on the host
        mask: GrammarMask | None = None,
    ) -> Sampled:
        """Sample every row. The logits stay as they are."""
        needs = self._needs(batch.idx_mapping)
        processed = mask is not None or bool(needs & self._processed)
        scores = self._process(logits, idx_mapping, seq_lens, batch, needs, mask) if processed else logits
        if needs & (_HAS_MIN_P | _TRUNCATED):
            scores = self._ops.sampling.filter(scores, idx_mapping, self._filters)
        tokens = self._ops.decode.pick(scores, idx_mapping, seq_lens, self.rows, bool(needs & _RANDOM))
        if processed:
            tokens = mark_hidden_nans(logits, tokens)
        return Sampled(tokens, self._logprobs(logits, tokens, batch) if needs & _LOGPROBS else None)

    def rehearse(self, logits: torch.Tensor) -> None:
        """Allocate what sampling every row of logits [rows, vocab] at a temperature with top-k and top-p would, for a profile of memory."""
        rows = logits.shape[0]
        ints = torch.ones(rows, dtype=torch.int64, device=logits.device)
        scores = logits.to(torch.float32, copy=True)
        filters = RowFilters(temperature=ints.float(), log_min_p=ints.float() - torch.inf, top_k=ints, top_p=ints.float() / 2)
        scores = self._ops.sampling.filter(scores, ints - 1, filters)
        sampling = RowSampling(temperature=ints.float(), seed=ints, stop_ids=self.rows.stop_ids)
        self._ops.decode.pick(scores, ints - 1, ints.to(torch.int32), sampling, any_random=True)

    def rehearse_kernels(self, logits: torch.Tensor) -> None:
        """Run every kernel that sampling up to so many rows of logits [rows, vocab] may ask for; no slot changes."""
        filtered, tops = self._ops.sampling.rehearsal(logits.shape[0])
        sizes = sorted({*filtered, *self._ops.decode.rehearsal(logits.shape[0])})
        nobody = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=logits.device)
        for rows in sizes:
            for scores in dict.fromkeys((logits[:rows], logits[:rows].float())):  # as they come, and processed
                for kept in (scores, self._ops.sampling.filter(scores, nobody[:rows], self._filters)):
                    self._ops.decode.pick(kept, nobody[:rows], nobody[:rows].to(torch.int32), self.rows, any_random=True)
        for top in tops:
            self.logprobs_of(logits, nobody.clamp(min=0), top)
        if sizes:
            bits = torch.zeros(1, -(-logits.shape[1] // 32), dtype=torch.int32, device=logits.device)
            self._ops.apply_bitmask(logits.float(), bits, nobody.to(torch.int32))

    def logprobs_of(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """Log-probabilities under logits [N, vocab] of `token_ids` int64 [N] and of the `num_top` most likely tokens."""
        return self._ops.sampling.logprobs(logits, token_ids, num_top)

    def prompt_logprobs(self, batch: Batch) -> list[tuple[int, int]]:
        """(row, number of top tokens) of the rows that want log-probabilities of their prompt."""
        if not self._needs(batch.idx_mapping) & _PROMPT_LOGPROBS:
            return []
        rows = np.flatnonzero((batch.idx_mapping >= 0) & (self._needs_np[batch.idx_mapping] & _PROMPT_LOGPROBS > 0))
        return [(int(row), int(self._num_prompt_logprobs_np[batch.idx_mapping[row]])) for row in rows]

    def _needs_of(self, params: SamplingParams) -> int:
        needs = sum(self._bits[processor] for processor in self._processors if processor.wants(params))
        if not params.is_greedy:
            needs |= _RANDOM
            needs |= _TRUNCATED if params.top_k > 0 or params.top_p < 1 else 0
            needs |= _HAS_MIN_P if params.min_p > 0 else 0
        needs |= _LOGPROBS if params.logprobs is not None else 0
        return needs | (_PROMPT_LOGPROBS if params.prompt_logprobs is not None else 0)

    def _needs(self, slots_np: npt.NDArray[np.int64]) -> int:
        """What any of these slots needs; those of dummy rows (-1) are left out."""
        return int(np.bitwise_or.reduce(np.where(slots_np >= 0, self._needs_np[slots_np], 0)))

    def _process(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, seq_lens: torch.Tensor, batch: Batch, needs: int, mask: GrammarMask | None
    ) -> torch.Tensor:
        scores = logits.to(torch.float32, copy=True).contiguous()
        if mask is not None:
            self._apply_mask(scores, batch, mask)
        slots, known = idx_mapping.clamp(min=0), seq_lens.to(torch.int64)
        rows = Rows(slots=slots, seq_lens=known, output_lens=known - self._ints[_PROMPT_LEN, slots])
        for processor, bit in self._bits.items():
            if needs & bit:
                processor.apply(scores, rows)
        return scores

    def _apply_mask(self, scores: torch.Tensor, batch: Batch, mask: GrammarMask) -> None:
        row_of = np.array([mask.rows.get(request_id, -1) for request_id in batch.request_ids], np.int32)
        # One copy: the map, then the bits.
        packed = self._transfer.to_device(np.concatenate([row_of, mask.bits.reshape(-1)]))
        count = len(row_of)
        self._ops.apply_bitmask(scores, packed[count:].view(mask.bits.shape), packed[:count])

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: Batch) -> StepLogprobs | None:
        """Of the rows that asked for them and whose prompt is complete."""
        slots = batch.idx_mapping
        wanted = (slots >= 0) & (self._needs_np[slots] & _LOGPROBS > 0) & (batch.seq_lens >= self._slots.prefill_len_np[slots])
        rows = np.flatnonzero(wanted)
        if not rows.size:
            return None
        if rows.size < len(slots):
            index = self._transfer.to_device(rows)
            logits, tokens = logits[index], tokens[index]
        counts = self._num_logprobs_np[slots[rows]]
        tensors = self.logprobs_of(logits, tokens.clamp(min=0), int(counts.max()))
        entries = zip(rows.tolist(), counts.tolist(), strict=True)
        named = (LogprobRows(batch.request_ids[row], at, 1, count, int(batch.seq_lens[row])) for at, (row, count) in enumerate(entries))
        return StepLogprobs(tensors, tuple(named))
