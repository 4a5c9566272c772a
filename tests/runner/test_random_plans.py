"""Random plans: the persistent batch equals one that is rebuilt from what each request is, and one that is condensed, bit for bit."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from rung.runner import CachedRequest, ModelRunner, NewRequest, SamplingParams, StepPlan
from rung.runner.ops import StepOps
from rung.runner.sampler.sampler import _LOG_MIN_P, _TOP_K, _TOP_P
from tests.runner.condensed_batch import CondensedBatch
from tests.runner.random_plans import BLOCK, LENGTH, ROWS, TOKENS, World, make_plan_runner

PLANS = 100


def check_rebuilt(runner: ModelRunner, world: World, plan: StepPlan) -> None:
    """Rebuild the whole batch from the requests and compare every buffer."""
    parked = runner.parked
    assert parked is not None
    assert parked.context is not None
    names = sorted(plan.num_scheduled_tokens, key=lambda n: (plan.num_scheduled_tokens[n] != 1, plan.num_scheduled_tokens[n]))
    assert list(parked.batch.request_ids) == names
    ids, positions, slots, starts, lens, table = [], [], [], [0], [], []
    for name in names:
        known, count = world.running[name], plan.num_scheduled_tokens[name]
        for p in range(known.computed, known.computed + count):
            ids.append(known.tokens[p])
            positions.append(p)
            slots.append(known.blocks[p // BLOCK] * BLOCK + p % BLOCK)
        starts.append(len(ids))
        lens.append(known.computed + count)
        table.append(known.blocks + [0] * (LENGTH // BLOCK - len(known.blocks)))
    padded, rows = parked.dispatch.num_tokens, parked.dispatch.num_requests or len(names)
    pad = padded - len(ids)
    buffers, group = runner.buffers, runner.block_tables[0]
    assert buffers.input_ids[:padded].tolist() == ids + [0] * pad
    assert buffers.positions[:padded].tolist() == positions + [0] * pad
    if parked.batch.uniform_query_len == 1 and parked.dispatch.num_requests is None and padded <= ROWS:
        # As in a decode graph: rows behind the batch are requests without a slot, and nobody looks beyond them.
        assert group.slot_mapping[:padded].tolist() == slots + [-1] * pad
        assert buffers.query_start_loc.tolist() == list(range(ROWS + 1))
        assert buffers.seq_lens[:padded].tolist() == lens + [1] * pad
        assert group.batch[:padded].tolist() == table + [[0] * (LENGTH // BLOCK)] * pad
    else:
        assert group.slot_mapping.tolist() == slots + [-1] * (TOKENS - len(ids))
        assert buffers.query_start_loc.tolist() == starts + [len(ids)] * (ROWS - len(names))
        assert buffers.seq_lens.tolist() == lens + [0] * (ROWS - len(names))
        assert group.batch.tolist() == table + [[0] * (LENGTH // BLOCK)] * (ROWS - len(names))
    metadata = parked.context.attention_metadata["only"]
    assert metadata.num_requests == rows
    assert metadata.block_table.shape[0] == rows
    assert metadata.slot_mapping.shape[0] == padded


def check_decoded(runner: ModelRunner, world: World, names: tuple[str, ...]) -> None:
    """What a decode graph left in the buffers, in its last step: one row a request, and rows without one behind them."""
    buffers, group = runner.buffers, runner.block_tables[0]
    for row, name in enumerate(names):
        known = world.running[name]
        if known.ended:  # the steps behind the stop token left the row alone
            assert int(buffers.idx_mapping[row]) == -1
            continue
        at = known.computed - 1
        assert int(buffers.idx_mapping[row]) == runner.slots.slot_of[name]
        assert (int(buffers.input_ids[row]), int(buffers.positions[row]), int(buffers.seq_lens[row])) == (known.tokens[at], at, at + 1)
        assert int(group.slot_mapping[row]) == known.blocks[at // BLOCK] * BLOCK + at % BLOCK
        assert group.batch[row].tolist() == known.blocks + [0] * (LENGTH // BLOCK - len(known.blocks))
    behind = slice(len(names), ROWS)
    assert buffers.idx_mapping[behind].tolist() == group.slot_mapping[behind].tolist() == [-1] * (ROWS - len(names))
    assert not group.batch[behind].any()


def check_condensed(runner: ModelRunner, oracle: CondensedBatch, plan: StepPlan, *, inputs: bool) -> None:
    """Every request has the same contents in the other batch, and its part of the flat inputs is the same."""
    assert oracle.requests.keys() == runner.slots.slot_of.keys()
    slots, sampler, group = runner.slots, runner.sampler, runner.block_tables[0]
    flat = oracle.flatten(plan.num_scheduled_tokens)
    ids = flat.request_ids
    assert len(ids) == len(oracle.row_of)
    rows, index = np.arange(len(ids)), torch.tensor([slots.slot_of[name] for name in ids], dtype=torch.int64, device=runner.device)
    for row in rows:
        known = int(oracle.num_blocks[row])
        assert group.table[index[row], :known].tolist() == oracle.block_table[row, :known].tolist()
    _equal(group.num_blocks[index], oracle.num_blocks[rows])
    _equal(slots.prefill_len[index], oracle.prefill_len[rows])
    _equal(sampler.rows.temperature[index], oracle.temperature[rows])
    _equal(sampler.rows.seed[index], oracle.seed[rows])
    _equal(sampler._floats[_TOP_P, index], oracle.top_p[rows])
    _equal(sampler._floats[_LOG_MIN_P, index], oracle.log_min_p[rows])
    _equal(sampler._ints[_TOP_K, index], oracle.top_k[rows])
    for name, slot in zip(ids, index.tolist(), strict=True):
        stops = {token for token in sampler.rows.stop_ids[slot].tolist() if token >= 0}
        assert stops == oracle.requests[name].stop_token_ids
    if inputs and ids:
        parked, buffers = runner.parked, runner.buffers
        assert parked is not None
        row_of = {name: row for row, name in enumerate(parked.batch.request_ids)}
        last_rows = runner.ops.logits_indices(buffers.query_start_loc, len(ids))
        for row, name in enumerate(ids):
            mine = slice(*buffers.query_start_loc[row_of[name] : row_of[name] + 2].tolist())
            theirs = slice(*flat.query_start_loc[row : row + 2].tolist())
            _equal(buffers.input_ids[mine], flat.input_ids[theirs])
            _equal(buffers.positions[mine], flat.positions[theirs])
            _equal(group.slot_mapping[mine], flat.slot_mapping[theirs])
            assert int(buffers.seq_lens[row_of[name]]) == flat.seq_lens[row]
            assert int(last_rows[row_of[name]]) - mine.start == flat.logits_indices[row] - theirs.start


def check_tokens(runner: ModelRunner, world: World, oracle: CondensedBatch) -> None:
    """Tokens and lengths by slot, and what the host believes of them."""
    slots = runner.slots
    assert slots.slot_of.keys() == world.running.keys() == oracle.requests.keys()
    for name, known in world.running.items():
        if known.ended:
            continue
        slot = slots.slot_of[name]
        assert slots.all_token_ids[slot, : len(known.tokens)].tolist() == known.tokens[:LENGTH]
        assert (slots.total_len[slot], slots.num_computed_tokens[slot]) == (len(known.tokens), known.computed)
        assert (slots.total_len_np[slot], slots.num_computed_tokens_np[slot]) == (len(known.tokens), known.computed)
        assert oracle.requests[name].token_ids == known.tokens
        row = oracle.row_of.get(name)
        if row is not None:
            assert oracle.num_tokens[row] == len(known.tokens)
            assert oracle.token_ids[row, : len(known.tokens)].tolist() == known.tokens[:LENGTH]


def _equal(mine: torch.Tensor, theirs: np.ndarray) -> None:
    values = mine.cpu().numpy()
    assert values.tobytes() == theirs.astype(values.dtype, casting="safe").tobytes()


def follow(
    seed: int,
    *,
    decode_in_graph: bool,
    piecewise_decodes: bool = False,
    device: torch.device | str = "cpu",
    ops: StepOps | None = None,
) -> Counter[str]:
    """`PLANS` plans through the runner and both oracles; counts what happened."""
    runner = make_plan_runner(seed, decode_in_graph=decode_in_graph, piecewise_decodes=piecewise_decodes, device=device, ops=ops)
    world, oracle, seen = World(seed), CondensedBatch(ROWS, LENGTH, BLOCK), Counter[str]()
    for _ in range(PLANS):
        plan = world.plan()
        seen["preempted"] += len(plan.preempted_request_ids)
        seen["resumed"] += sum(change.resumed for change in plan.cached_requests)
        oracle.apply(plan)
        empty = runner.execute_model(plan)
        assert (empty is not None) == (not plan.num_scheduled_tokens)
        parked = runner.parked
        if parked is None:
            check_condensed(runner, oracle, plan, inputs=False)
        else:
            replayed = parked.context is None
            # A graph that has made several steps holds the inputs of the last one.
            check_condensed(runner, oracle, plan, inputs=parked.tokens is None or plan.num_steps == 1)
            if not replayed:
                check_rebuilt(runner, world, plan)
            samples = {name: oracle.samples(name, count) for name, count in plan.num_scheduled_tokens.items()}
            output = runner.sample_tokens()
            assert output is not None
            result = output.get_output()
            sampled = dict(zip(result.request_ids, result.sampled_token_ids, strict=True))
            world.take(plan, sampled)
            oracle.advance(sampled)
            for name, tokens in sampled.items():
                assert len(tokens) == samples[name] * plan.num_steps or world.running[name].ended
            if replayed and parked.tokens is not None:
                check_decoded(runner, world, parked.batch.request_ids)
            seen["replayed"] += replayed
            seen["sampled in the graph"] += replayed and parked.tokens is not None
            seen["sampled by its operations"] += not replayed and parked.tokens is not None
            seen["several steps"] += plan.num_steps > 1
            seen["ended"] += sum(known.ended for known in world.running.values())
        check_tokens(runner, world, oracle)
    seen["moved"] = oracle.moves
    return seen


@pytest.mark.parametrize("decode_in_graph", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_persistent_batch_equals_its_oracles(seed: int, decode_in_graph: bool) -> None:
    seen = follow(seed, decode_in_graph=decode_in_graph)
    assert min(seen[name] for name in ("preempted", "resumed", "several steps", "ended", "moved")) > 0
    assert (seen["replayed"] > 20, seen["sampled in the graph"] > 5) == (decode_in_graph, decode_in_graph)
    assert (seen["sampled by its operations"] > 5) == decode_in_graph


@pytest.mark.parametrize("decode_in_graph", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_decodes_without_a_decode_graph_equal_the_oracles(seed: int, decode_in_graph: bool) -> None:
    """Their inputs are built in another way than those of prompts, before and behind which they run."""
    seen = follow(seed, decode_in_graph=decode_in_graph, piecewise_decodes=True)
    assert min(seen[name] for name in ("preempted", "resumed", "several steps", "ended", "moved")) > 0
    assert seen["replayed"] == seen["sampled in the graph"] == 0
    assert (seen["sampled by its operations"] > 5) == decode_in_graph


def test_the_condensed_batch_fills_gaps_from_the_end() -> None:
    oracle = CondensedBatch(4, 8, 4)
    new = [
        NewRequest(request_id=name, token_ids=(n,) * (n + 1), prompt_len=1, block_ids=((n + 1,),), sampling=SamplingParams(seed=n))
        for n, name in enumerate("abcd")
    ]
    oracle.apply(StepPlan(new_requests=tuple(new), num_scheduled_tokens=dict.fromkeys("abcd", 1)))
    assert oracle.ids == ["a", "b", "c", "d"]
    oracle.apply(StepPlan(num_scheduled_tokens=dict.fromkeys("bd", 1), finished_request_ids=frozenset("a")))
    assert oracle.ids == ["d", "b", None, None]
    assert (oracle.requests.keys(), oracle.token_ids[0, :4].tolist(), oracle.block_table[0, 0]) == (set("bcd"), [3] * 4, 4)
    back = CachedRequest(request_id="c", num_computed_tokens=0, new_block_ids=((7, 8),), resumed=True)
    oracle.apply(StepPlan(cached_requests=(back,), num_scheduled_tokens=dict.fromkeys("bcd", 1)))
    assert oracle.ids == ["d", "b", "c", None]
    assert oracle.block_table[2].tolist() == [7, 8]
