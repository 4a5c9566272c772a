from __future__ import annotations

import pytest
import torch

from rung.counters import Count, Counters
from rung.errors import InternalError
from rung.runner.ops import TorchStepOps
from rung.runner.sampler.slot_lists import SlotLists
from rung.runner.slots import RequestSlots
from rung.runner.staging import StagedWrites
from rung.runner.transfer import HostToDevice

CPU = torch.device("cpu")


def make_slots(rows: int = 1024, length: int = 32) -> RequestSlots:
    return RequestSlots(rows, length, HostToDevice(CPU, Counters()), TorchStepOps())


def test_slots_come_from_the_end_and_the_last_freed_is_taken_first() -> None:
    slots = make_slots()
    assert [slots.add(name, [1], 1) for name in ("R1", "R2", "R3")] == [1023, 1022, 1021]
    slots.remove("R1")
    slots.remove("R3")
    assert [slots.add(name, [1], 1) for name in ("R4", "R5", "R6")] == [1021, 1023, 1020]


def test_tensors_have_the_documented_shapes_and_types() -> None:
    slots = make_slots(8, 32)
    found = {name: (getattr(slots, name).dtype, tuple(getattr(slots, name).shape)) for name in ("all_token_ids", "last_sampled_tokens")}
    assert found == {"all_token_ids": (torch.int32, (8, 32)), "last_sampled_tokens": (torch.int64, (8, 1))}
    assert {getattr(slots, name).dtype for name in ("prefill_len", "num_computed_tokens", "total_len")} == {torch.int32}


def test_add_reaches_the_device_only_when_applied() -> None:
    slots = make_slots(4, 8)
    slot = slots.add("a", [5, 6, 7], prompt_len=2, num_computed_tokens=1)
    assert slots.all_token_ids[slot].sum() == 0
    slots.apply_staged_writes()
    assert slots.all_token_ids[slot].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert (slots.prefill_len[slot], slots.total_len[slot], slots.num_computed_tokens[slot]) == (3, 3, 1)
    assert slots.prompt_len_np[slot] == 2


def test_more_requests_than_slots_is_an_error() -> None:
    slots = make_slots(1)
    slots.add("a", [1], 1)
    with pytest.raises(InternalError, match="no free slots"):
        slots.add("b", [1], 1)


def test_a_write_that_cannot_be_made_is_gone() -> None:
    target = torch.zeros(2, 2, dtype=torch.int64)
    staged = StagedWrites(target, HostToDevice(CPU, Counters()), TorchStepOps())
    staged.stage(0, 0, [2**63])
    with pytest.raises(OverflowError):
        staged.apply()
    staged.stage(1, 0, [3])
    staged.apply()
    assert target.tolist() == [[0, 0], [3, 0]]


def test_a_list_that_cannot_be_written_is_gone() -> None:
    lists = SlotLists(2, torch.int64, -1, HostToDevice(CPU, Counters()), TorchStepOps())
    lists.set(0, [2**63])
    with pytest.raises(OverflowError):
        lists.apply_staged_writes()
    lists.set(1, [3])
    lists.apply_staged_writes()
    assert lists.table[:, 0].tolist() == [-1, 3]


def test_staged_writes_travel_as_one_copy_and_later_ones_win() -> None:
    counters = Counters()
    target = torch.zeros(3, 4, dtype=torch.int32)
    staged = StagedWrites(target, HostToDevice(CPU, counters), TorchStepOps())
    staged.stage(0, 0, [1, 2, 3])
    staged.stage(2, 3, [9])
    staged.stage(0, 1, [7, 8, 6])
    with counters.expect(**{Count.HOST_TO_DEVICE_COPIES: 1}):
        staged.apply()
    assert target.tolist() == [[1, 7, 8, 6], [0, 0, 0, 0], [0, 0, 0, 9]]
    with counters.expect(**{Count.HOST_TO_DEVICE_COPIES: 0}):
        staged.apply()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_staged_writes_keep_the_type(dtype: torch.dtype) -> None:
    target = torch.zeros(2, 2, dtype=dtype)
    staged = StagedWrites(target, HostToDevice(CPU, Counters()), TorchStepOps())
    staged.stage(1, 0, [3, -4])
    staged.apply()
    assert target.tolist() == [[0, 0], [3, -4]]
