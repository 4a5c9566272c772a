"""Random plans: the persistent batch equals one that is rebuilt from what each request is, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from rung.attention import Attention, AttentionSpec
from rung.context import ForwardContext
from rung.graphs import Descriptor, Dispatch, GraphMode, exact
from rung.runner import (
    CachedRequest,
    Forward,
    ModelRunner,
    NewRequest,
    RunnerConfig,
    SamplingParams,
    StepPlan,
)
from rung.runner.batch import Batch
from tests.runner.tiny import PlainAttention

BLOCK, LENGTH, ROWS, TOKENS = 4, 40, 5, 24


class NoModel(nn.Module):
    """Draws its logits, so that the tokens are arbitrary."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.attention = Attention("only", AttentionSpec(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0))
        self.generator = torch.Generator().manual_seed(seed)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.randn(hidden.shape[0], 100, generator=self.generator)


class PaddedForward(Forward):
    """Runs nothing; pads as graphs would, to multiples of 8, FULL for decodes."""

    def dispatch(self, batch: Batch) -> Dispatch:
        if batch.num_tokens > 16:
            return Dispatch(exact(batch.shape))
        if batch.uniform_query_len == 1:
            return Dispatch(Descriptor(mode=GraphMode.FULL, num_tokens=5, num_requests=5))
        return Dispatch(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=-(-batch.num_tokens // 8) * 8))

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return torch.zeros(dispatch.num_tokens, 1)


@dataclass
class Known:
    """A request as the test knows it, without any persistent state."""

    tokens: list[int]
    prompt_len: int
    computed: int = 0
    prefill_len: int = 0
    blocks: list[int] = field(default_factory=list)


class World:
    """Makes random valid plans and remembers what they mean."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.running: dict[str, Known] = {}
        self.preempted: dict[str, Known] = {}
        self.count = 0
        self.leaving: set[str] = set()

    def plan(self) -> StepPlan:
        chance = self.chance
        finished = {name for name, r in self.running.items() if len(r.tokens) >= LENGTH or chance.random() < 0.05}
        preempted = {name for name in self.running if name not in finished and chance.random() < 0.05}
        for name in finished:
            del self.running[name]
        self.preempted |= {name: self.running.pop(name) for name in preempted}
        scheduled: dict[str, int] = {}
        budget = TOKENS
        cached = [self._cached(name, scheduled) for name in list(self.running) if chance.random() < 0.8]
        budget -= sum(scheduled.values())
        new = []
        while len(self.running) < ROWS and budget > 0 and chance.random() < 0.6:
            name, known = self._arrival(preempted)
            count = chance.randint(1, min(len(known.tokens), budget))
            self._need(known, count)
            budget -= count
            scheduled[name] = count
            self.running[name] = known
            new.append(
                NewRequest(
                    request_id=name,
                    token_ids=tuple(known.tokens),
                    prompt_len=known.prompt_len,
                    block_ids=(tuple(known.blocks),),
                    sampling=SamplingParams(),
                )
            )
        items = list(scheduled.items())
        chance.shuffle(items)
        return StepPlan(
            new_requests=tuple(new),
            cached_requests=tuple(c for c in cached if c is not None),
            num_scheduled_tokens=dict(items),
            finished_request_ids=frozenset(finished),
            preempted_request_ids=frozenset(preempted),
        )

    def _cached(self, name: str, scheduled: dict[str, int]) -> CachedRequest | None:
        known = self.running[name]
        resumed = self.chance.random() < 0.1
        if resumed:
            known.computed, known.prefill_len, known.blocks = 0, len(known.tokens), []
        count = min(self.chance.randint(1, 8), len(known.tokens) - known.computed, TOKENS - sum(scheduled.values()))
        if count <= 0 and not resumed:
            return None
        added = self._need(known, max(count, 1))
        if count > 0:
            scheduled[name] = count
        return CachedRequest(
            request_id=name, num_computed_tokens=known.computed, new_block_ids=(tuple(added),) if added or resumed else (), resumed=resumed
        )

    def _arrival(self, just_preempted: set[str]) -> tuple[str, Known]:
        back = [name for name in self.preempted if name not in just_preempted]
        if back and self.chance.random() < 0.5:
            known = self.preempted.pop(back[0])
            known.computed, known.prefill_len, known.blocks = 0, len(known.tokens), []
            return back[0], known
        self.count += 1
        tokens = [self.chance.randrange(100) for _ in range(self.chance.randint(1, 20))]
        return f"r{self.count}", Known(tokens, len(tokens), prefill_len=len(tokens))

    def _need(self, known: Known, count: int) -> list[int]:
        needed = -(-(known.computed + count) // BLOCK) - len(known.blocks)
        added = [self.chance.randrange(1, 1000) for _ in range(needed)]
        known.blocks += added
        return added


def check(runner: ModelRunner, world: World, plan: StepPlan) -> None:
    """Rebuild the whole batch from the requests and compare every buffer."""
    parked = runner.parked
    assert parked is not None
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
    assert group.slot_mapping.tolist() == slots + [-1] * (TOKENS - len(ids))
    assert buffers.query_start_loc.tolist() == starts + [len(ids)] * (ROWS - len(names))
    assert buffers.seq_lens.tolist() == lens + [0] * (ROWS - len(names))
    assert group.batch.tolist() == table + [[0] * (LENGTH // BLOCK)] * (ROWS - len(names))
    metadata = parked.context.attention_metadata["only"]
    assert metadata.num_requests == rows
    assert metadata.block_table.shape[0] == rows
    assert metadata.slot_mapping.shape[0] == padded


@pytest.mark.parametrize("seed", range(10))
def test_persistent_batch_equals_one_rebuilt_from_scratch(seed: int) -> None:
    config = RunnerConfig(max_num_requests=ROWS, max_num_tokens=TOKENS, max_model_len=LENGTH, block_size=BLOCK, num_blocks=1000)
    runner = ModelRunner(NoModel(seed), config, backend=PlainAttention, forward=PaddedForward())
    world = World(seed)
    for _ in range(60):
        plan = world.plan()
        empty = runner.execute_model(plan)
        assert (empty is not None) == (not plan.num_scheduled_tokens)
        if empty is None:
            check(runner, world, plan)
            output = runner.sample_tokens()
            assert output is not None
            result = output.get_output()
            for name, tokens in zip(result.request_ids, result.sampled_token_ids, strict=True):
                known = world.running[name]
                known.computed += plan.num_scheduled_tokens[name]
                assert len(tokens) == (known.computed >= known.prefill_len)
                known.tokens += tokens
        assert runner.slots.slot_of.keys() == world.running.keys()
        for name, known in world.running.items():
            slot = runner.slots.slot_of[name]
            assert runner.slots.all_token_ids[slot, : len(known.tokens)].tolist() == known.tokens[:LENGTH]
            assert (runner.slots.total_len[slot], runner.slots.num_computed_tokens[slot]) == (len(known.tokens), known.computed)
            assert (runner.slots.total_len_np[slot], runner.slots.num_computed_tokens_np[slot]) == (len(known.tokens), known.computed)
