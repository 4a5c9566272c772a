"""A step plan's changes to slots, sampling parameters and block tables."""

from __future__ import annotations

from collections.abc import Sequence

from rung.runner.block_table import BlockTable
from rung.runner.plan import StepPlan
from rung.runner.sampler import Sampler
from rung.runner.slots import RequestSlots


def changes_slots(plan: StepPlan) -> bool:
    """Whether requests come, go or start anew, so that the slots of the next batch may be others."""
    left = plan.finished_request_ids or plan.preempted_request_ids
    return bool(plan.new_requests or left or any(cached.resumed for cached in plan.cached_requests))


def apply_plan(plan: StepPlan, slots: RequestSlots, sampler: Sampler, tables: Sequence[BlockTable]) -> None:
    """Enqueue the changes of a plan that was checked; `tables` are one a KV-cache group."""
    # Sorted, so that every process that follows the same plans frees the same slots in the same order.
    for request_id in sorted(plan.finished_request_ids | plan.preempted_request_ids):
        slot = slots.remove(request_id)
        for table in tables:
            table.release(slot)
    for new in plan.new_requests:  # before anything that could fail: whoever came in a plan that failed can leave
        slots.add(new.request_id, new.token_ids, new.prompt_len, new.num_computed_tokens)
    for new in plan.new_requests:
        slot = slots.slot_of[new.request_id]
        sampler.add(slot, new.sampling, new.stop_token_ids, prompt_len=new.prompt_len, num_tokens=len(new.token_ids))
        for table, blocks in zip(tables, new.block_ids, strict=True):
            table.write(slot, blocks, replace=True)
    for cached in plan.cached_requests:
        slot = slots.slot_of[cached.request_id]
        if cached.resumed:
            slots.restart(slot, cached.num_computed_tokens)
        if cached.new_block_ids:
            for table, blocks in zip(tables, cached.new_block_ids, strict=True):
                if blocks or cached.resumed:
                    table.write(slot, blocks, replace=cached.resumed)
        for table, count in zip(tables, cached.num_null_blocks, strict=False):
            table.clear_front(slot, count)
    slots.apply_staged_writes()
    sampler.apply_staged_writes()
    for table in tables:
        table.apply_staged_writes()
