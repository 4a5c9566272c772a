from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.counters import Counters
from rung.runner import SamplingParams
from rung.runner.batch import Batch
from rung.runner.ops import StepOps, TorchStepOps, decode_base
from rung.runner.ops.triton_decode import ChunkTiles, TritonDecodeOps
from rung.runner.sampler import Sampler
from rung.runner.sampler.failures import NAN_TOKEN, NOTHING_ALLOWED_TOKEN
from rung.runner.transfer import HostToDevice
from tests.runner.decode_worlds import HISTORY, SLOTS, VOCAB, DecodeWorld, draw


@pytest.mark.parametrize("seed", range(20))
def test_inputs_equal_those_of_a_step(step_ops: StepOps, seed: int) -> None:
    contents, rows = draw(np.random.default_rng(seed))
    world, step = DecodeWorld(step_ops), DecodeWorld(TorchStepOps())
    for one in (world, step):
        one.load(contents)
    world.ops.decode.inputs(world.slots, world.table, world.buffers, rows)
    ops, buffers, slots, table = step.ops, step.buffers, step.slots, step.table
    layout = (buffers.idx_mapping, buffers.query_start_loc)
    ops.positions_and_lengths(*layout, slots.num_computed_tokens, buffers.positions, buffers.seq_lens, rows)
    ops.prefill_ids(*layout, buffers.positions, slots.prefill_len, slots.all_token_ids, buffers.input_ids, rows)
    ops.last_sampled_ids(*layout, buffers.positions, slots.prefill_len, slots.last_sampled_tokens, buffers.input_ids, rows)
    table.gather(buffers.idx_mapping, rows)
    table.map_slots(*layout, buffers.positions, rows)
    for name in ("input_ids", "positions", "seq_lens", "batch_table", "slot_mapping"):
        assert torch.equal(world.tensors[name][:rows], step.tensors[name][:rows]), name


@pytest.mark.parametrize("seed", range(20))
def test_sampling_equals_the_sampler_and_the_advance_of_a_step(step_ops: StepOps, seed: int) -> None:
    contents, rows = draw(np.random.default_rng(seed))
    contents["enabled"] = torch.ones(1)
    world, step = DecodeWorld(step_ops), DecodeWorld(TorchStepOps())
    for one in (world, step):
        one.load(contents)
        one.ops.decode.inputs(one.slots, one.table, one.buffers, rows)
    world.ops.decode.sample(world.logits[:rows], world.slots, world.buffers, world.sampling, world.state)
    sampler = Sampler(step.slots, HostToDevice(torch.device("cpu"), Counters()), step.ops)
    for slot in range(SLOTS):
        params = SamplingParams(temperature=float(contents["temperature"][slot]), seed=int(contents["seed"][slot]))
        sampler.add(slot, params)
    sampler.apply_staged_writes()
    idx, seq_lens = step.buffers.idx_mapping[:rows], step.buffers.seq_lens[:rows]
    batch = Batch(
        request_ids=("",) * rows,
        idx_mapping=idx.numpy(),
        query_lens=np.ones(rows, np.int32),
        query_start_loc=np.arange(rows + 1, dtype=np.int32),
        seq_lens=seq_lens.numpy(),
        has_prefill=False,
        uniform_query_len=1,
    )
    sampled = sampler.sample(step.logits[:rows], idx, seq_lens, batch).tokens
    num_sampled = step.ops.num_sampled(idx, seq_lens, step.slots.prefill_len, rows)
    step.ops.advance(step.slots, step.buffers.idx_mapping, step.buffers.query_start_loc, sampled.clamp(min=0), num_sampled)
    for name in ("num_computed_tokens", "total_len", "all_token_ids", "last_sampled_tokens"):
        assert torch.equal(world.tensors[name], step.tensors[name]), name
    expected = torch.where(num_sampled > 0, sampled, -1)
    assert torch.equal(world.state.history[int(world.state.step) % world.state.history.shape[0], :rows], expected)
    stopped = (contents["stop_ids"][idx] == expected.unsqueeze(1)).any(1) & (expected >= 0) | (expected < -1)
    assert torch.equal(world.buffers.idx_mapping[:rows], torch.where(stopped, -1, idx))


@pytest.mark.parametrize("seed", range(10))
def test_prompts_among_decodes_advance_by_their_queries(step_ops: StepOps, seed: int) -> None:
    rng = np.random.default_rng(seed)
    contents, rows = draw(rng)
    queries = np.where(rng.random(SLOTS) < 0.5, 1, rng.integers(1, 9, SLOTS))
    idx = contents["idx_mapping"].clamp(min=0)
    contents |= {
        "enabled": torch.ones(1),
        "temperature": torch.zeros(SLOTS),
        "query_start_loc": torch.from_numpy(np.concatenate([[0], np.cumsum(queries)])),
        "seq_lens": contents["num_computed_tokens"][idx] + torch.from_numpy(queries),
        "prefill_len": contents["num_computed_tokens"] + torch.from_numpy(rng.integers(-3, 12, SLOTS)).clamp(max=11),
    }
    world, step = DecodeWorld(step_ops), DecodeWorld(TorchStepOps())
    for one in (world, step):
        one.load(contents)
    world.ops.decode.sample(world.logits[:rows], world.slots, world.buffers, world.sampling, world.state)
    idx_mapping, seq_lens = step.buffers.idx_mapping[:rows], step.buffers.seq_lens[:rows]
    sampled = step.ops.decode.pick(step.logits[:rows], idx_mapping, seq_lens, step.sampling, any_random=False)
    num_sampled = step.ops.num_sampled(idx_mapping, seq_lens, step.slots.prefill_len, rows)
    step.ops.advance(step.slots, idx_mapping, step.buffers.query_start_loc, sampled.clamp(min=0), num_sampled)
    for name in ("num_computed_tokens", "total_len", "all_token_ids", "last_sampled_tokens"):
        assert torch.equal(world.tensors[name], step.tensors[name]), name
    recorded = world.state.history[int(world.state.step) % HISTORY, :rows]
    assert torch.equal(recorded, torch.where(num_sampled > 0, sampled, -1))


def test_a_disabled_step_counts_and_changes_nothing_else(step_ops: StepOps) -> None:
    contents, rows = draw(np.random.default_rng(3))
    contents["enabled"] = torch.zeros(1)
    world, before = DecodeWorld(step_ops), DecodeWorld(step_ops)
    for one in (world, before):
        one.load(contents)
    world.ops.decode.sample(world.logits[:rows], world.slots, world.buffers, world.sampling, world.state)
    assert world.differences(before) == ["step"]
    assert int(world.state.step) == int(before.state.step) + 1


def test_random_batches_equal_the_torch_twin(triton_ops: StepOps) -> None:
    rng = np.random.default_rng(0)
    world, oracle = DecodeWorld(triton_ops), DecodeWorld(TorchStepOps())
    for number in range(20):
        contents, rows = draw(rng)
        for one in (world, oracle):
            one.load(contents)
            one.step(rows)
        assert world.differences(oracle) == [], f"batch {number}"


def test_a_row_of_nan_gives_a_token_of_the_vocabulary(step_ops: StepOps) -> None:
    contents, rows = draw(np.random.default_rng(5))
    contents["logits"][0, 7:] = float("nan")
    contents["temperature"].zero_()
    world = DecodeWorld(step_ops)
    world.load(contents)
    world.load({"enabled": torch.ones(1), "idx_mapping": torch.arange(SLOTS), "prefill_len": torch.ones(SLOTS)})
    world.step(rows)
    assert 0 <= int(world.slots.last_sampled_tokens[0, 0]) < VOCAB


@pytest.mark.parametrize("seed", range(10))
def test_a_pick_outside_of_a_graph_is_that_of_the_graph(step_ops: StepOps, seed: int) -> None:
    contents, rows = draw(np.random.default_rng(seed))
    contents["enabled"] = torch.ones(1)
    contents["prefill_len"] = torch.zeros(SLOTS)
    world = DecodeWorld(step_ops)
    world.load(contents)
    idx, seq_lens = world.buffers.idx_mapping[:rows].clone(), world.buffers.seq_lens[:rows]
    picked = step_ops.decode.pick(world.logits[:rows], idx, seq_lens, world.sampling, any_random=True)
    step_ops.decode.sample(world.logits[:rows], world.slots, world.buffers, world.sampling, world.state)
    recorded = world.state.history[int(world.state.step) % HISTORY, :rows]
    assert torch.equal(recorded, torch.where(idx >= 0, picked, -1))


@pytest.mark.parametrize("vocab", [1, 7, 2048, 2049])
def test_a_pick_marks_rows_that_fail(step_ops: StepOps, vocab: int) -> None:
    world = DecodeWorld(step_ops)
    scores = torch.zeros(4, vocab)
    scores[1, -1] = torch.nan
    scores[2] = -torch.inf
    scores[3, 0] = torch.inf
    idx, seq_lens = torch.tensor([0, 1, -1, 2]), torch.ones(4, dtype=torch.int32)
    assert step_ops.decode.pick(scores, idx, seq_lens, world.sampling, any_random=False).tolist() == [
        0,
        NAN_TOKEN,
        NOTHING_ALLOWED_TOKEN,
        0,
    ]


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_of_a_program_are_one_row(triton_ops: StepOps, steps: int, dtype: torch.dtype) -> None:
    decode = TritonDecodeOps(tiles=ChunkTiles(block=32, steps=steps, num_warps=1))
    world = DecodeWorld(triton_ops)
    world.sampling.temperature[3] = 0.7
    world.sampling.seed.copy_(torch.arange(SLOTS))
    scores = torch.randint(-4, 4, (8, 301), generator=torch.Generator().manual_seed(steps)).to(dtype)  # the best is there many times
    scores[4:6, ::2] = -0.0
    scores[4:6, 1::2] = 0.0
    scores[5, 200:] = 0.5
    scores[6, 130] = torch.nan
    scores[7] = -torch.inf
    idx, seq_lens = torch.tensor([0, 1, 3, -1, 4, 5, 6, 7]), torch.arange(1, 9, dtype=torch.int32)
    picked = decode.pick(scores, idx, seq_lens, world.sampling, any_random=True)
    assert torch.equal(picked, TorchStepOps().decode.pick(scores, idx, seq_lens, world.sampling, any_random=True))
    greedy = [0, 1, 3, 4, 5]
    assert torch.equal(picked[greedy], (scores[greedy] == scores[greedy].amax(1, keepdim=True)).int().argmax(dim=1))
    assert picked[4:].tolist() == [0, 200, NAN_TOKEN, NOTHING_ALLOWED_TOKEN]


@pytest.mark.parametrize("early", [False, True])
def test_a_step_is_settled_only_where_kernels_start_early(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    monkeypatch.setattr(decode_base, "launches_early", lambda device: early)
    state = decode_base.DecodeState.allocate(4, 2, torch.device("cpu"))
    TorchStepOps().decode.settle(state)
    assert state.fence.tolist() == [int(early)]
