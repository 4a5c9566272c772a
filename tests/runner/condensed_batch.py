"""Another persistent batch, as an oracle: rows are kept dense by diffing each plan against the batch and closing the gaps.

A request keeps its id and not its row. What is not scheduled leaves the batch and stays known; the host owns all state and flattens the
inputs of a step with numpy. Nothing here is shared with `rung.runner.slots`, whose rows never move and which advances on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rung.runner import CachedRequest, NewRequest, SamplingParams, StepPlan


@dataclass(slots=True)
class KnownRequest:
    """An unfinished request, in the batch or out of it."""

    token_ids: list[int]
    prefill_len: int
    num_computed: int
    block_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """What a step of the rows would read, in row order."""

    request_ids: tuple[str, ...]
    input_ids: npt.NDArray[np.int32]  # [num_tokens]
    positions: npt.NDArray[np.int64]  # [num_tokens]
    slot_mapping: npt.NDArray[np.int64]  # [num_tokens]
    query_start_loc: npt.NDArray[np.int32]  # [num_requests + 1]
    seq_lens: npt.NDArray[np.int32]  # [num_requests]
    logits_indices: npt.NDArray[np.int32]  # [num_requests]


class CondensedBatch:
    """`apply` a plan, read `flatten` and the rows, `advance` by what was sampled."""

    def __init__(self, num_rows: int, max_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[str, KnownRequest] = {}
        self.row_of: dict[str, int] = {}
        self.ids: list[str | None] = [None] * num_rows
        self.moves = 0  # rows that were moved into a gap
        # The columns that move with a row
        self.token_ids = np.zeros((num_rows, max_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.prefill_len = np.zeros(num_rows, np.int32)
        self.block_table = np.zeros((num_rows, -(-max_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.zeros(num_rows, np.float32)
        self.log_min_p = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.int64)
        self._columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def apply(self, plan: StepPlan) -> None:
        """Diff, then close the gaps. A preempted request is forgotten like a finished one: it comes again as a new one."""
        for request_id in plan.finished_request_ids | plan.preempted_request_ids:
            del self.requests[request_id]
            self._leave(request_id)
        resumed = {change.request_id for change in plan.cached_requests if change.resumed}
        for request_id in self.row_of.keys() - (plan.num_scheduled_tokens.keys() - resumed):
            self._leave(request_id)
        for new in plan.new_requests:
            self.requests[new.request_id] = _known(new)
        for change in plan.cached_requests:
            self._change(change)
        for request_id in plan.num_scheduled_tokens:
            if request_id not in self.row_of:
                self._enter(request_id)
        self._condense()

    def flatten(self, num_scheduled_tokens: Mapping[str, int]) -> FlatInputs:
        ids = tuple(request_id for request_id in self.ids if request_id is not None)
        assert set(ids) == num_scheduled_tokens.keys()
        counts = np.array([num_scheduled_tokens[request_id] for request_id in ids], np.int32)
        starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        rows = np.repeat(np.arange(len(ids)), counts)
        positions = self.num_computed[rows].astype(np.int64) + np.arange(len(rows)) - starts[rows]
        blocks = self.block_table[rows, positions // self.block_size].astype(np.int64)
        return FlatInputs(
            request_ids=ids,
            input_ids=self.token_ids[rows, positions],
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start_loc=starts,
            seq_lens=self.num_computed[: len(ids)] + counts,
            logits_indices=starts[1:] - 1,
        )

    def samples(self, request_id: str, num_scheduled: int) -> bool:
        """Whether the token of this row counts: its prefill is complete with this step."""
        row = self.row_of[request_id]
        return bool(self.num_computed[row] + num_scheduled >= self.prefill_len[row])

    def advance(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Append tokens; how far a request is computed comes with its next plan."""
        for request_id, tokens in sampled.items():
            row, known = self.row_of[request_id], self.requests[request_id]
            known.token_ids += tokens
            fitting = tokens[: self.token_ids.shape[1] - self.num_tokens[row]]
            self.token_ids[row, self.num_tokens[row] : self.num_tokens[row] + len(fitting)] = fitting
            self.num_tokens[row] += len(tokens)

    def _change(self, change: CachedRequest) -> None:
        known = self.requests[change.request_id]
        known.num_computed = change.num_computed_tokens
        added = list(change.new_block_ids[0]) if change.new_block_ids else []
        known.block_ids = added if change.resumed else known.block_ids + added
        if change.resumed:
            known.prefill_len = len(known.token_ids)
        row = self.row_of.get(change.request_id)
        if row is not None:
            assert not change.resumed
            self.num_computed[row] = change.num_computed_tokens
            self.block_table[row, self.num_blocks[row] : self.num_blocks[row] + len(added)] = added
            self.num_blocks[row] += len(added)

    def _leave(self, request_id: str) -> None:
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self.ids[row] = None

    def _enter(self, request_id: str) -> None:
        row, known = self.ids.index(None), self.requests[request_id]
        self.ids[row], self.row_of[request_id] = request_id, row
        for column in self._columns:
            column[row] = 0
        self.token_ids[row, : len(known.token_ids)] = known.token_ids
        self.num_tokens[row], self.num_computed[row] = len(known.token_ids), known.num_computed
        self.prefill_len[row] = known.prefill_len
        self.block_table[row, : len(known.block_ids)] = known.block_ids
        self.num_blocks[row] = len(known.block_ids)
        sampling = known.sampling
        self.temperature[row], self.top_p[row] = sampling.temperature, sampling.top_p
        self.log_min_p[row] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self.top_k[row], self.seed[row] = sampling.top_k, sampling.seed or 0

    def _condense(self) -> None:
        """The highest row goes into the lowest gap until the rows are dense; every column goes along."""
        while None in self.ids[: len(self.row_of)]:
            gap = self.ids.index(None)
            last = max(self.row_of.values())
            moved = self.ids[last]
            assert moved is not None
            for column in self._columns:
                column[gap] = column[last]
            self.ids[gap], self.ids[last] = moved, None
            self.row_of[moved] = gap
            self.moves += 1


def _known(new: NewRequest) -> KnownRequest:
    return KnownRequest(
        token_ids=list(new.token_ids),
        prefill_len=len(new.token_ids),
        num_computed=new.num_computed_tokens,
        block_ids=list(new.block_ids[0]),
        sampling=new.sampling,
        stop_token_ids=new.stop_token_ids,
    )
