"""The documents' worked numbers, on the buffers a step fills."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rung.counters import Counters
from rung.graphs import Descriptor, Dispatch, GraphMode
from rung.runner.batch import Batch, batch_order, dummy_batch, gather_batch
from rung.runner.block_table import BlockTable
from rung.runner.inputs import InputBuffers, InputBuilder
from rung.runner.metadata import build_metadata
from rung.runner.ops import StepOps, TorchStepOps
from rung.runner.slots import RequestSlots
from rung.runner.transfer import HostToDevice


class Step:
    """Slots, table and buffers of a runner without its model."""

    def __init__(
        self, ops: StepOps | None = None, rows: int = 1024, max_tokens: int = 512, length: int = 1024, max_blocks: int = 64
    ) -> None:
        transfer, ops = HostToDevice(torch.device("cpu"), Counters()), ops or TorchStepOps()
        self.ops = ops
        self.slots = RequestSlots(rows, length, transfer, ops)
        self.table = BlockTable(rows, max_blocks, max_tokens, 16, transfer, ops)
        self.buffers = InputBuffers.allocate(max_tokens, rows, torch.device("cpu"))
        self.builder = InputBuilder(self.buffers, self.slots, transfer, ops)

    def add(self, name: str, done: int, total: int, blocks: list[int], prompt: int | None = None) -> int:
        ids = [(1000 * len(self.slots.slot_of) + i) % 50000 for i in range(total)]
        slot = self.slots.add(name, ids, prompt or total, done)
        self.table.write(slot, tuple(blocks), replace=True)
        self.slots.apply_staged_writes()
        self.table.apply_staged_writes()
        return slot

    def prepare(self, scheduled: dict[str, int], padded: int | None = None) -> Batch:
        batch = gather_batch(scheduled, self.slots)
        self.builder.upload(batch)
        self.builder.build(padded or batch.num_tokens, batch.has_prefill)
        return batch

    def slot_mapping(self, padded: int) -> torch.Tensor:
        buffers = self.buffers
        return self.table.map_slots(buffers.idx_mapping, buffers.query_start_loc, buffers.positions, padded)

    def logits_indices(self, batch: Batch) -> list[int]:
        return self.ops.logits_indices(self.buffers.query_start_loc, batch.num_requests).tolist()


def add_decoding(step: Step, name: str, done: int, blocks: list[int], last: int) -> None:
    """A request whose last token was sampled, and is not computed yet."""
    slot = step.add(name, done, done, blocks)
    step.slots.last_sampled_tokens[slot] = last
    step.slots.all_token_ids[slot, done] = last
    step.slots.total_len[slot] += 1
    step.slots.total_len_np[slot] += 1


def in_order(step: Step, scheduled: dict[str, int]) -> Batch:
    """The batch in the order of `scheduled`: the documents' flat examples are not sorted."""
    batch = gather_batch(scheduled, step.slots)
    order = [batch.request_ids.index(name) for name in scheduled]
    query_lens = batch.query_lens[order]
    return replace(
        batch,
        request_ids=tuple(scheduled),
        idx_mapping=batch.idx_mapping[order],
        query_lens=query_lens,
        query_start_loc=np.concatenate([[0], query_lens.cumsum()]).astype(np.int32),
        seq_lens=batch.seq_lens[order],
    )


def test_tv1_flat_batch(step_ops: StepOps) -> None:
    step = Step(step_ops)
    step.add("A", 0, 5, [7])
    step.add("B", 37, 38, [2, 9, 4])
    step.add("C", 32, 35, [11, 12, 3])
    batch = in_order(step, {"A": 5, "B": 1, "C": 3})
    step.builder.upload(batch)
    step.builder.build(9, True)
    assert step.buffers.query_start_loc[:4].tolist() == [0, 5, 6, 9]
    assert step.buffers.positions[:9].tolist() == [0, 1, 2, 3, 4, 37, 32, 33, 34]
    assert step.buffers.seq_lens[:3].tolist() == [5, 38, 35]
    assert step.slot_mapping(9).tolist() == [112, 113, 114, 115, 116, 69, 48, 49, 50]
    assert step.logits_indices(batch) == [4, 5, 8]


def test_tv3_lengths_and_who_is_sampled(step_ops: StepOps) -> None:
    step = Step(step_ops)
    for name, done, total, blocks in (("a", 100, 102, 7), ("b", 0, 600, 38), ("c", 40, 60, 4)):
        step.add(name, done, total, list(range(1, blocks + 1)))
    batch = in_order(step, {"a": 2, "b": 5, "c": 3})
    step.builder.upload(batch)
    step.builder.build(10, True)
    assert step.buffers.positions[:10].tolist() == [100, 101, 0, 1, 2, 3, 4, 40, 41, 42]
    assert step.buffers.query_start_loc[:4].tolist() == [0, 2, 7, 10]
    assert step.buffers.query_start_loc[4:].unique().tolist() == [10]
    assert step.buffers.seq_lens[:4].tolist() == [102, 5, 43, 0]
    assert step.logits_indices(batch) == [1, 6, 9]
    slots = [1023] * 2 + [1022] * 5 + [1021] * 3
    assert torch.equal(step.buffers.input_ids[:10], step.slots.all_token_ids[slots, step.buffers.positions[:10]])
    sampled = step.ops.num_sampled(step.buffers.idx_mapping, step.buffers.seq_lens, step.slots.prefill_len, 3)
    assert sampled.tolist() == [1, 0, 0]  # only `a` reaches the end of its known tokens


def tv4(ops: StepOps | None = None) -> Step:
    step = Step(ops)
    add_decoding(step, "R1", 40, [7, 8, 9], 501)
    add_decoding(step, "R2", 17, [3, 5], 502)
    step.add("R3", 0, 6, [11])
    return step


def test_tv4_mixed_step(step_ops: StepOps) -> None:
    step = tv4(step_ops)
    batch = step.prepare({"R3": 6, "R1": 1, "R2": 1}, padded=16)
    buffers = step.buffers
    assert batch.request_ids == ("R1", "R2", "R3")
    assert batch.idx_mapping.tolist() == [1023, 1022, 1021]
    assert buffers.idx_mapping[:4].tolist() == [1023, 1022, 1021, -1]
    assert buffers.query_start_loc[:4].tolist() == [0, 1, 2, 8]
    assert buffers.query_start_loc[4:].unique().tolist() == [8]
    assert buffers.query_start_loc.shape == (1025,)
    assert buffers.positions[:8].tolist() == [40, 17, 0, 1, 2, 3, 4, 5]
    assert buffers.seq_lens[:3].tolist() == [41, 18, 6]
    assert not buffers.seq_lens[3:].any()
    assert buffers.input_ids[:8].tolist() == [501, 502, *step.slots.all_token_ids[1021, :6].tolist()]
    assert step.logits_indices(batch) == [0, 1, 7]
    assert step.slot_mapping(16).tolist() == [152, 81, 176, 177, 178, 179, 180, 181] + [-1] * 8
    assert batch.uniform_query_len is None


def test_tv4_types() -> None:
    buffers = tv4().buffers
    assert (buffers.input_ids.dtype, buffers.positions.dtype) == (torch.int32, torch.int64)
    assert (buffers.query_start_loc.dtype, buffers.seq_lens.dtype, buffers.idx_mapping.dtype) == (torch.int32, torch.int32, torch.int64)


def test_tv4_only_two_arrays_are_copied(step_ops: StepOps) -> None:
    step = tv4(step_ops)
    counters = step.builder._transfer.counters
    before = counters["host_to_device_copies"]
    step.prepare({"R3": 6, "R1": 1, "R2": 1})
    assert counters["host_to_device_copies"] - before == 1


def test_tv4_after_the_step(step_ops: StepOps) -> None:
    step = tv4(step_ops)
    batch = step.prepare({"R3": 6, "R1": 1, "R2": 1})
    sampled = torch.tensor([11, 22, 33])
    step.ops.advance(step.slots, step.buffers.idx_mapping, step.buffers.query_start_loc, sampled, torch.ones(3, dtype=torch.int32))
    slots, order = step.slots, torch.from_numpy(batch.idx_mapping)
    assert slots.num_computed_tokens[order].tolist() == [41, 18, 6]
    assert slots.last_sampled_tokens[order, 0].tolist() == [11, 22, 33]
    assert slots.total_len[order].tolist() == [42, 19, 7]
    assert slots.all_token_ids[order, slots.total_len[order] - 1].tolist() == [11, 22, 33]
    assert not slots.num_computed_tokens[:1021].any()


def test_tv4_next_step_is_a_uniform_decode(step_ops: StepOps) -> None:
    step = tv4(step_ops)
    step.prepare({"R3": 6, "R1": 1, "R2": 1})
    sampled = torch.tensor([11, 22, 33])
    step.ops.advance(step.slots, step.buffers.idx_mapping, step.buffers.query_start_loc, sampled, torch.ones(3, dtype=torch.int32))
    step.slots.num_computed_tokens_np[[1023, 1022, 1021]] = [41, 18, 6]
    batch = step.prepare({"R1": 1, "R2": 1, "R3": 1}, padded=4)
    assert batch.uniform_query_len == 1
    assert step.buffers.seq_lens[:4].tolist() == [42, 19, 7, 0]
    assert step.buffers.input_ids[:4].tolist() == [11, 22, 33, 0]
    dispatch = Dispatch(Descriptor(mode=GraphMode.FULL, num_tokens=4, num_requests=4))
    table = step.table.gather(step.buffers.idx_mapping, 4)
    metadata = build_metadata(batch, dispatch, step.buffers, table, step.slot_mapping(4), 1024)
    assert (metadata.num_requests, metadata.num_actual_tokens, metadata.max_seq_len) == (4, 4, 1024)
    assert metadata.host is None
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 3]
    assert metadata.block_table[:, :4].tolist() == [[7, 8, 9, 0], [3, 5, 0, 0], [11, 0, 0, 0], [0, 0, 0, 0]]
    assert metadata.slot_mapping.tolist() == [9 * 16 + 9, 5 * 16 + 2, 11 * 16 + 6, -1]


def test_order_quiz() -> None:
    assert batch_order({"long": 300, "decode": 1, "short": 12}) == ["decode", "short", "long"]
    assert batch_order({"x": 1, "y": 1, "z": 1}) == ["x", "y", "z"]


def test_one_token_over_a_context_is_a_decode_and_a_first_token_is_not() -> None:
    step = Step()
    step.add("tail", 4, 5, [1])
    assert gather_batch({"tail": 1}, step.slots).uniform_query_len == 1
    step.add("first", 0, 1, [2])
    assert gather_batch({"tail": 1, "first": 1}, step.slots).uniform_query_len is None


def test_tv5_tour(step_ops: StepOps) -> None:
    step = Step(step_ops)
    add_decoding(step, "R1", 540, list(range(100, 134)), 31)
    add_decoding(step, "R2", 129, list(range(200, 209)), 32)
    step.add("R3", 0, 298, list(range(300, 319)))
    batch = step.prepare({"R3": 298, "R1": 1, "R2": 1}, padded=304)
    buffers = step.buffers
    assert (batch.num_tokens, batch.num_requests, batch.uniform_query_len, batch.has_prefill) == (300, 3, None, True)
    assert buffers.query_start_loc[:4].tolist() == [0, 1, 2, 300]
    assert buffers.query_start_loc[4:].unique().tolist() == [300]
    assert buffers.positions[:300].tolist() == [540, 129, *range(298)]
    assert buffers.seq_lens[:3].tolist() == [541, 130, 298]
    assert buffers.input_ids[:3].tolist() == [31, 32, int(step.slots.all_token_ids[1021, 0])]
    assert step.logits_indices(batch) == [0, 1, 299]
    mapping = step.slot_mapping(304)
    assert mapping[:2].tolist() == [133 * 16 + 12, 208 * 16 + 1]
    assert mapping[2:300].tolist() == [(300 + p // 16) * 16 + p % 16 for p in range(298)]
    assert mapping[300:].tolist() == [-1] * 4
    dispatch = Dispatch(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=304))
    metadata = build_metadata(batch, dispatch, buffers, step.table.gather(buffers.idx_mapping, 3), mapping, 1024)
    assert (metadata.num_requests, metadata.num_actual_tokens, metadata.max_query_len, metadata.max_seq_len) == (3, 300, 298, 541)
    assert metadata.slot_mapping.shape == (304,)
    assert metadata.block_table.shape == (3, 64)
    assert metadata.host is not None
    assert metadata.host.query_start_loc.tolist() == [0, 1, 2, 300]
    assert metadata.host.seq_lens.tolist() == [541, 130, 298]


def test_addresses_are_fixed() -> None:
    step = tv4()
    names = ("input_ids", "positions", "query_start_loc", "seq_lens", "idx_mapping")
    before = [getattr(step.buffers, name).data_ptr() for name in names]
    step.prepare({"R3": 6, "R1": 1})
    step.prepare({"R1": 1, "R2": 1}, padded=8)
    assert [getattr(step.buffers, name).data_ptr() for name in names] == before


def test_a_dummy_batch_writes_no_slot_and_reads_no_table(step_ops: StepOps) -> None:
    step = tv4(step_ops)
    step.prepare({"R3": 6, "R1": 1, "R2": 1})
    step.table.gather(step.buffers.idx_mapping, 3)
    batch = dummy_batch(np.array([1, 1, 1, 1], np.int32), decode=True)
    step.builder.upload(batch)
    step.builder.build(4, False)
    assert batch.uniform_query_len == 1
    assert step.slot_mapping(4).tolist() == [-1] * 4
    assert not step.table.gather(step.buffers.idx_mapping, 4).any()
    assert step.buffers.input_ids[:4].tolist() == [0] * 4
    assert step.buffers.seq_lens[:5].tolist() == [1, 1, 1, 1, 0]
    before = step.slots.num_computed_tokens.clone()
    step.ops.advance(
        step.slots, step.buffers.idx_mapping, step.buffers.query_start_loc, torch.tensor([9] * 4), torch.ones(4, dtype=torch.int32)
    )
    assert torch.equal(step.slots.num_computed_tokens, before)
    assert not (step.slots.last_sampled_tokens == 9).any()
