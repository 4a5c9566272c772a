"""Are the block ids of a plan sound? A wrong one would let two requests write into each other's keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rung.errors import BlockTableError
from rung.runner.block_pool import NULL_BLOCK
from rung.runner.block_table import BlockTable
from rung.runner.kv_groups import first_block
from rung.runner.plan import StepPlan
from rung.runner.slots import RequestSlots

_HINT = "a request writes into blocks that it has alone; take them from the scheduler's pool, and name those who leave in the same plan"


def check_blocks(
    plan: StepPlan, slots: RequestSlots, tables: Sequence[BlockTable], windows: Sequence[int | None], num_blocks: Sequence[int]
) -> None:
    """Raises `BlockTableError` for an id outside of the cache, and for one that a request would write to while another row has it. Blocks
    whose tokens are computed (a found prefix) may be shared. The plan's other parts were checked."""
    if plan.new_requests or any(cached.new_block_ids for cached in plan.cached_requests):
        for group, (table, window, count) in enumerate(zip(tables, windows, num_blocks, strict=True)):
            _check_group(plan, slots, group, table, window, count)


def _check_group(plan: StepPlan, slots: RequestSlots, group: int, table: BlockTable, window: int | None, count: int) -> None:
    freed = _freed(plan, slots, group, table)
    written: set[int] = set()
    read: set[int] = set()
    for name, blocks, first, computed in _added(plan, slots, group, table):
        for index, block in enumerate(blocks, start=first):
            if not NULL_BLOCK < block < count:
                if block == NULL_BLOCK and index < first_block(computed, window, table.block_size):
                    continue
                _fail(name, block, f"expected one in [1, {count})")
            if index < computed // table.block_size:
                read.add(block)
                continue
            if block in written or table.owners.get(block, 0) > freed[block]:
                _fail(name, block, "which another row has")
            written.add(block)
    if both := written & read:
        raise BlockTableError(f"block {min(both)} is written in the plan that shares it as computed", hint=_HINT)


def _added(plan: StepPlan, slots: RequestSlots, group: int, table: BlockTable) -> Iterator[tuple[str, Sequence[int], int, int]]:
    """Request, its new blocks, the place of the first in its row, and its computed tokens."""
    for new in plan.new_requests:
        yield new.request_id, new.block_ids[group], 0, new.num_computed_tokens
    for cached in plan.cached_requests:
        if cached.new_block_ids:
            held = 0 if cached.resumed else len(table.rows[slots.slot_of[cached.request_id]])
            yield cached.request_id, cached.new_block_ids[group], held, cached.num_computed_tokens


def _freed(plan: StepPlan, slots: RequestSlots, group: int, table: BlockTable) -> Counter[int]:
    """Blocks that rows give up with this plan."""
    freed: Counter[int] = Counter()
    for name in plan.finished_request_ids | plan.preempted_request_ids:
        freed.update(table.rows[slots.slot_of[name]])
    for cached in plan.cached_requests:
        if cached.resumed:
            freed.update(table.rows[slots.slot_of[cached.request_id]])
        elif cached.num_null_blocks:
            freed.update(table.rows[slots.slot_of[cached.request_id]][: cached.num_null_blocks[group]])
    return freed


def _fail(name: str, block: int, why: str) -> None:
    raise BlockTableError(f"request {name!r} gets block {block}, {why}", hint=_HINT)
