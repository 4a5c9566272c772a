"""Is a plan acceptable? Asked before anything of it is applied, so that a bad plan leaves every request as it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rung.errors import BlockTableError, RequestError
from rung.runner.batch import Batch
from rung.runner.block_check import check_blocks
from rung.runner.block_table import BlockTable
from rung.runner.config import RunnerConfig
from rung.runner.kv_groups import first_block
from rung.runner.plan import BlockIds, CachedRequest, NewRequest, StepPlan
from rung.runner.slots import RequestSlots

_HINT = "the scheduler and the runner disagree; build plans with rung.runner.Scheduler, or compare them with ModelRunner.slots"


class PlanChecker:
    """Raises `RequestError` (or `BlockTableError`) that names the request."""

    def __init__(
        self,
        config: RunnerConfig,
        slots: RequestSlots,
        tables: Sequence[BlockTable],
        windows: Sequence[int | None],
        vocab_size: int | None = None,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._slots = slots
        self._tables = tables
        self._windows = windows

    def check(self, plan: StepPlan, num_blocks: Sequence[int], repeated: Batch | None = None) -> None:
        """`num_blocks`: of the cache of each group. `repeated`: the plan's decodes, when they are those of the last batch and its slots
        stay as they are; saves looking them up."""
        slots = self._slots
        leaving = plan.finished_request_ids | plan.preempted_request_ids
        for request_id in leaving:
            _require(request_id in slots.slot_of, f"request {request_id!r} leaves but has no slot")
        new = {request.request_id: request for request in plan.new_requests}
        cached = {request.request_id: request for request in plan.cached_requests}
        _require(len(new) == len(plan.new_requests), "a new request comes twice in one plan")
        _require(len(cached) == len(plan.cached_requests), "a cached request comes twice in one plan")
        for request in plan.new_requests:
            self._check_new(request, leaving)
        for known in plan.cached_requests:
            self._check_cached(known, leaving)
        free = len(slots.free_slots) + len(leaving)
        _require(len(new) <= free, f"{len(new)} new requests come and {free} of {self._config.max_num_requests} slots are free")
        _require(
            1 <= plan.num_steps <= self._config.replay_steps, f"num_steps is {plan.num_steps}, replay_steps {self._config.replay_steps}"
        )
        _require(plan.num_steps == 1 or not plan.has_bitmask, "a grammar mask holds for one step, the plan has several")
        if repeated is None:
            self._check_scheduled(plan, new, cached, leaving)
        else:
            self._check_running(repeated.request_ids, repeated.idx_mapping, repeated.query_lens, plan)
        check_blocks(plan, slots, self._tables, self._windows, num_blocks)

    def _check_new(self, request: NewRequest, leaving: frozenset[str]) -> None:
        name, length = request.request_id, len(request.token_ids)
        _require(isinstance(name, str), f"new request {name!r}: its id is no text")
        _require(name not in self._slots.slot_of or name in leaving, f"new request {name!r} has a slot already")
        _require(1 <= request.prompt_len <= length, f"new request {name!r} has {length} tokens and prompt_len {request.prompt_len}")
        limit = self._config.max_model_len
        _require(length <= limit, f"new request {name!r} has {length} tokens, max_model_len is {limit}")
        computed = request.num_computed_tokens
        _require(0 <= computed < length, f"new request {name!r} has {length} tokens, of which {computed} are said to be computed")
        self._check_tokens(name, request.token_ids)
        if self._vocab_size is not None:
            request.sampling.check_vocabulary(name, self._vocab_size)
        self._check_blocks(None, request.block_ids, replace=True)

    def _check_tokens(self, name: str, token_ids: Sequence[int]) -> None:
        tokens, limit = np.asarray(token_ids), self._vocab_size or np.iinfo(np.int32).max
        bad = tokens.dtype.kind != "i" or (tokens < 0) | (tokens >= limit)
        if np.any(bad):
            index = int(np.argmax(bad))
            raise RequestError(
                f"new request {name!r}: token {index} is {token_ids[index]!r}, expected an id in [0, {limit})",
                hint="use ids of the model's own tokenizer",
            )

    def _check_cached(self, request: CachedRequest, leaving: frozenset[str]) -> None:
        name = request.request_id
        slot = self._slot(name, leaving)
        computed = self._slots.num_computed_tokens_np.item(slot)
        if not request.resumed and request.num_computed_tokens != computed:
            raise RequestError(f"request {name!r} has {computed} computed tokens, the plan says {request.num_computed_tokens}", hint=_HINT)
        known = self._slots.total_len_np.item(slot)
        _require(
            0 <= request.num_computed_tokens < known or not request.resumed,
            f"resumed request {name!r} has {known} tokens, of which {request.num_computed_tokens} are said to be computed",
        )
        if request.new_block_ids or request.resumed:
            self._check_blocks(slot, request.new_block_ids, replace=request.resumed)
        if request.num_null_blocks:
            self._check_nulls(slot, request)

    def _check_nulls(self, slot: int, request: CachedRequest) -> None:
        counts, groups = request.num_null_blocks, len(self._tables)
        _require(len(counts) == groups, f"null blocks of {len(counts)} KV-cache groups came, there are {groups}")
        for table, count, window in zip(self._tables, counts, self._windows, strict=True):
            passed = first_block(request.num_computed_tokens, window, table.block_size)
            _require(0 <= count <= passed, f"{count} blocks of request {request.request_id!r} become null, {passed} lie behind the window")

    def _check_blocks(self, slot: int | None, block_ids: BlockIds, *, replace: bool) -> None:
        count = len(self._tables)
        _require(len(block_ids) == count, f"block ids for {len(block_ids)} KV-cache groups came, there are {count}")
        for table, blocks in zip(self._tables, block_ids, strict=True):
            table.check(slot, len(blocks), replace)

    def _check_scheduled(
        self, plan: StepPlan, new: dict[str, NewRequest], cached: dict[str, CachedRequest], leaving: frozenset[str]
    ) -> None:
        total, budget = plan.total_num_scheduled_tokens, self._config.max_num_tokens
        _require(total <= budget, f"the plan has {total} tokens, max_num_tokens is {budget}")
        rest = []
        for name, count in plan.num_scheduled_tokens.items():
            if not isinstance(count, int) or count < 1:
                raise RequestError(f"request {name!r} is scheduled with {count!r} tokens", hint=_HINT)
            if (request := new.get(name)) is not None:
                blocks = [len(b) for b in request.block_ids]
                self._check_extent(name, request.num_computed_tokens, count, len(request.token_ids), blocks, plan.num_steps)
            elif (change := cached.get(name)) is not None and change.resumed:
                known = self._slots.total_len_np.item(self._slot(name, leaving))
                blocks = [len(b) for b in change.new_block_ids]
                self._check_extent(name, change.num_computed_tokens, count, known, blocks, plan.num_steps)
            else:
                rest.append(name)
        if rest:
            rows = np.array([self._slot(name, leaving) for name in rest], np.int64)
            self._check_running(rest, rows, np.array([plan.num_scheduled_tokens[name] for name in rest], np.int32), plan)

    def _check_running(self, names: Sequence[str], rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int32], plan: StepPlan) -> None:
        """All requests that only go on, at once; the first bad one is looked at alone for its message. `rows` are their slots."""
        computed, known = self._slots.num_computed_tokens_np[rows], self._slots.total_len_np[rows]
        ends = computed + counts
        bad = ends > known
        if plan.num_steps != 1:
            bad |= (counts != 1) | (ends != known) | (ends + plan.num_steps > self._config.max_model_len)
        needed = -(-(ends + (plan.num_steps - 1)) // self._config.block_size)
        held = [table.num_blocks_np[rows] for table in self._tables]
        if plan.cached_requests:
            held = [blocks + self._added(group, plan)[rows] for group, blocks in enumerate(held)]
        for blocks in held:
            bad |= blocks < needed
        if bad.any():
            row = int(bad.argmax())
            blocks_of_row = [int(blocks[row]) for blocks in held]
            self._check_extent(names[row], int(computed[row]), int(counts[row]), int(known[row]), blocks_of_row, plan.num_steps)

    def _added(self, group: int, plan: StepPlan) -> npt.NDArray[np.int32]:
        """Blocks that the plan appends in a group, by slot."""
        added = np.zeros(self._config.max_num_requests, np.int32)
        for change in plan.cached_requests:
            if change.new_block_ids and not change.resumed:
                added[self._slots.slot_of[change.request_id]] = len(change.new_block_ids[group])
        return added

    def _check_extent(self, name: str, computed: int, count: int, known: int, blocks: Sequence[int], num_steps: int) -> None:
        end = computed + count
        _require(end <= known, f"request {name!r} is scheduled up to token {end} and has {known}")
        if num_steps != 1:
            _require(count == 1 and end == known, f"request {name!r} is not decoding in a plan of {num_steps} steps")
            limit = self._config.max_model_len
            _require(end + num_steps <= limit, f"request {name!r} has {known} tokens, {num_steps} more do not fit in {limit}")
            end += num_steps - 1
        for table, num_blocks in zip(self._tables, blocks, strict=True):
            if num_blocks * table.block_size < end:
                raise BlockTableError(
                    f"request {name!r} is scheduled up to token {end} and has {num_blocks} blocks of {table.block_size} tokens", hint=_HINT
                )

    def _slot(self, request_id: str, leaving: frozenset[str]) -> int:
        slot = self._slots.slot_of.get(request_id)
        if slot is None or request_id in leaving:
            raise RequestError(f"request {request_id!r} is unknown: it has no slot", hint=_HINT)
        return slot


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RequestError(message, hint=_HINT)
