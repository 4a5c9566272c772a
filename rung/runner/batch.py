"""The host's view of one step: which requests, in which order, from which slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rung.graphs import Shape
from rung.runner.plan import StepPlan
from rung.runner.slots import RequestSlots

DECODE_QUERY_LEN = 1  # tokens of a decode; 1 + drafts once there is speculation


def batch_order(num_scheduled_tokens: Mapping[str, int]) -> list[str]:
    """Decodes first, then by token count, ties in the plan's order: attention backends expect decode-like rows at the front."""
    if len(set(num_scheduled_tokens.values())) == 1:
        return list(num_scheduled_tokens)
    return sorted(num_scheduled_tokens, key=lambda r: (num_scheduled_tokens[r] != DECODE_QUERY_LEN, num_scheduled_tokens[r]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's batch; arrays have one entry for each request, in batch order. A dummy batch has slots -1."""

    request_ids: tuple[str, ...]
    idx_mapping: npt.NDArray[np.int64]  # slots
    query_lens: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]  # [num_requests + 1]
    seq_lens: npt.NDArray[np.int32]  # computed and scheduled tokens
    has_prefill: bool  # some row's token is not the last sampled one
    uniform_query_len: int | None  # tokens of every request, when the batch may run as a decode graph

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        return self.uniform_query_len or int(self.query_lens.max())

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())

    @property
    def shape(self) -> Shape:
        """What the dispatcher asks about the batch."""
        return Shape(
            num_tokens=self.num_tokens,
            num_requests=self.num_requests,
            uniform_query_len=self.uniform_query_len,
            max_query_len=self.max_query_len,
        )


def gather_batch(num_scheduled_tokens: Mapping[str, int], slots: RequestSlots) -> Batch:
    """The batch of a plan whose changes have been applied to `slots`."""
    request_ids = batch_order(num_scheduled_tokens)
    idx_mapping = np.array([slots.slot_of[r] for r in request_ids], np.int64)
    query_lens = np.array([num_scheduled_tokens[r] for r in request_ids], np.int32)
    computed = slots.num_computed_tokens_np[idx_mapping]
    prefilling = computed < slots.prefill_len_np[idx_mapping]
    # One more token over an existing context is a decode to the kernels, wherever the token comes from.
    decodes = ~prefilling | ((query_lens == DECODE_QUERY_LEN) & (computed > 0))
    return _batch(tuple(request_ids), idx_mapping, query_lens, computed, bool(prefilling.any()), bool(decodes.all()))


class BatchBuilder:
    """The batches of plans. A plan with the decodes of the last one, while slots stay as they are, keeps its arrays; only lengths move."""

    def __init__(self, slots: RequestSlots) -> None:
        self._slots = slots
        self._decodes: Batch | None = None  # the last batch, when it can be repeated

    def forget(self) -> None:
        """Requests come, go or start anew."""
        self._decodes = None

    def repeated(self, plan: StepPlan) -> Batch | None:
        """The last batch, when the plan has its requests in its order, one token each. Its lengths are those of then."""
        last, scheduled = self._decodes, plan.num_scheduled_tokens
        same = last is not None and tuple(scheduled) == last.request_ids and set(scheduled.values()) == {DECODE_QUERY_LEN}
        return last if same else None

    def build(self, plan: StepPlan, repeated: Batch | None = None) -> Batch:
        """The batch of a plan whose changes have been applied; `repeated` of the same plan saves looking it up."""
        if repeated is None:
            batch = gather_batch(plan.num_scheduled_tokens, self._slots)
        else:
            batch = self.next(repeated)
        self._decodes = batch if batch.uniform_query_len == DECODE_QUERY_LEN and not batch.has_prefill else None
        return batch

    def next(self, batch: Batch) -> Batch:
        """One more decode of the same requests."""
        return replace(batch, seq_lens=self._slots.num_computed_tokens_np[batch.idx_mapping] + batch.query_lens)


def advance_mirrors(slots: RequestSlots, batch: Batch, num_steps: int) -> None:
    """What the host knows of the slots once the batch has run `num_steps` times; of several each is a decode."""
    rows = batch.idx_mapping
    slots.num_computed_tokens_np[rows] = batch.seq_lens + (num_steps - 1)
    if batch.has_prefill:
        slots.total_len_np[rows] += (batch.seq_lens >= slots.prefill_len_np[rows]) * np.int32(num_steps)
    else:  # all known tokens are computed
        slots.total_len_np[rows] = batch.seq_lens + num_steps


def dummy_batch(query_lens: npt.NDArray[np.int32], *, decode: bool = False, max_seq_len: int = 0) -> Batch:
    """A batch that belongs to no request: it reads no slot, writes no KV cache and advances nothing. `max_seq_len` is the bound that the
    host has of its lengths, for launches that depend on it."""
    ids = tuple(f"dummy-{i}" for i in range(len(query_lens)))
    computed = np.zeros_like(query_lens)
    computed[0] = max(0, max_seq_len - int(query_lens[0]))
    return _batch(ids, np.full(len(query_lens), -1, np.int64), query_lens, computed, not decode, decode)


def dummy_query_lens(num_tokens: int, num_requests: int, max_model_len: int) -> npt.NDArray[np.int32]:
    """Few long requests that together have `num_tokens` tokens, or as many as `num_requests` of the maximum length can have."""
    total = min(num_tokens, num_requests * max_model_len)
    lens = np.full(-(-total // max_model_len), max_model_len, np.int32)
    lens[-1] = total - max_model_len * (len(lens) - 1)
    return lens


def _batch(
    request_ids: tuple[str, ...],
    idx_mapping: npt.NDArray[np.int64],
    query_lens: npt.NDArray[np.int32],
    computed: npt.NDArray[np.int32],
    has_prefill: bool,
    decodes: bool,
) -> Batch:
    query_start_loc = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    uniform = decodes and bool((query_lens == query_lens[0]).all())
    return Batch(
        request_ids=request_ids,
        idx_mapping=idx_mapping,
        query_lens=query_lens,
        query_start_loc=query_start_loc,
        seq_lens=computed + query_lens,
        has_prefill=has_prefill,
        uniform_query_len=int(query_lens[0]) if uniform else None,
    )
