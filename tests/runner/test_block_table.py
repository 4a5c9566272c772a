from __future__ import annotations

import pytest
import torch

from rung.counters import Counters
from rung.errors import BlockTableError
from rung.runner.block_table import BlockTable
from rung.runner.ops import StepOps, TorchStepOps
from rung.runner.transfer import HostToDevice


def make_table(ops: StepOps | None = None, rows: int = 4, blocks: int = 3, tokens: int = 8) -> BlockTable:
    return BlockTable(rows, blocks, tokens, 4, HostToDevice(torch.device("cpu"), Counters()), ops or TorchStepOps())


def mapping(*slots: int) -> torch.Tensor:
    return torch.tensor([*slots] + [-1] * (4 - len(slots)))


def test_blocks_are_appended_or_replaced(step_ops: StepOps) -> None:
    table = make_table(step_ops)
    table.write(2, (5, 6), replace=True)
    table.write(2, (7,), replace=False)
    table.apply_staged_writes()
    assert table.gather(mapping(2), 1).tolist() == [[5, 6, 7]]
    table.write(2, (9,), replace=True)
    table.apply_staged_writes()
    assert table.gather(mapping(2), 1).tolist() == [[9, 0, 0]]  # nothing of the former owner


def test_padded_and_stale_rows_are_zero(step_ops: StepOps) -> None:
    table = make_table(step_ops)
    for slot in range(4):
        table.write(slot, (slot + 1,), replace=True)
    table.apply_staged_writes()
    table.gather(mapping(0, 1, 2, 3), 4)
    assert table.gather(mapping(3), 2).tolist() == [[4, 0, 0], [0, 0, 0]]
    assert table.batch.tolist() == [[4, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_the_whole_mapping_behind_the_tokens_is_minus_one(step_ops: StepOps) -> None:
    table = make_table(step_ops)
    table.write(1, (2, 3), replace=True)
    table.apply_staged_writes()
    table.slot_mapping.fill_(77)
    start = torch.tensor([0, 2, 2, 2, 2], dtype=torch.int32)
    result = table.map_slots(mapping(1), start, torch.tensor([3, 4, 0, 0, 0, 0, 0, 0]), 4)
    assert result.tolist() == [2 * 4 + 3, 3 * 4 + 0, -1, -1]
    assert table.slot_mapping.tolist() == [11, 12, -1, -1, -1, -1, -1, -1]


def test_a_row_that_is_full_refuses_more() -> None:
    table = make_table()
    table.write(0, (1, 2), replace=True)
    with pytest.raises(BlockTableError, match=r"holds 3 blocks, the request has 2 and the plan adds 2"):
        table.write(0, (3, 4), replace=False)


def test_slot_minus_one_writes_nothing() -> None:
    """Padded rows carry -1; plain indexing would read that as the last slot."""
    from rung.attention import KVCache
    from tests.runner.tiny import PlainAttention, TinyModel

    spec = TinyModel().layers[0].attention.spec
    storage = torch.randn(2, 20 + 2, 4, 2, 8)  # 80 slots, a guard block before and behind
    before = storage.clone()
    cache = KVCache(storage[0, 1:-1], storage[1, 1:-1])
    slots = torch.tensor([79, 3, 40, 41, 0, -1, -1, -1])
    rows = torch.full((8, 2, 8), 7.0)
    PlainAttention(spec).write_kv(rows, rows, cache, slots)
    changed = (storage != before).flatten(3).any(-1)  # [2, blocks, block_size]
    assert changed.flatten(1).nonzero()[:, 1].unique().tolist() == sorted(4 + s for s in (79, 3, 40, 41, 0))
