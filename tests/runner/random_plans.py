"""Random valid plans, and a runner without a model that follows them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import nn

from rung.attention import Attention, AttentionSpec
from rung.context import ForwardContext
from rung.graphs import Descriptor, Dispatch, GraphMode, exact
from rung.runner import CachedRequest, Forward, ModelRunner, NewRequest, RunnerConfig, SamplingParams, StepPlan
from rung.runner.batch import Batch
from rung.runner.decode import DecodeStep
from rung.runner.ops import StepOps
from tests.runner.tiny import PlainAttention

BLOCK, LENGTH, ROWS, TOKENS, VOCAB, MOST_STEPS = 4, 40, 5, 24, 100, 3


class NoModel(nn.Module):
    """Draws its logits, so that the tokens are arbitrary."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.attention = Attention("only", AttentionSpec(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0))
        self.generator = torch.Generator().manual_seed(seed)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.randn(hidden.shape[0], VOCAB, generator=self.generator).to(hidden.device)


class PaddedForward(Forward):
    """Runs nothing; pads as graphs would, to multiples of 8, FULL for decodes. Once bound, decodes make their whole step themselves.
    With `piecewise_decodes` they are PIECEWISE instead, as large as they are, as all requests or larger, or run without a graph."""

    def __init__(self, device: torch.device | str, *, piecewise_decodes: bool = False) -> None:
        self._device = device
        self._piecewise_decodes = piecewise_decodes
        self._decode: DecodeStep | None = None

    def bind_decode(self, decode: DecodeStep) -> None:
        self._decode = decode

    def advances(self, dispatch: Dispatch) -> bool:
        return self._decode is not None and dispatch.mode is GraphMode.FULL

    def advance(self, dispatch: Dispatch) -> torch.Tensor:
        assert self._decode is not None
        self._decode.build_inputs(dispatch.num_tokens)
        return self._decode.finish(torch.zeros(dispatch.num_tokens, 1, device=self._device))

    def dispatch(self, batch: Batch) -> Dispatch:
        if batch.num_tokens > 16:
            return Dispatch(exact(batch.shape))
        if batch.uniform_query_len == 1 and self._piecewise_decodes:
            sizes = (None, ROWS, batch.num_tokens, 8)
            size = sizes[int(batch.seq_lens.sum()) % len(sizes)]
            return Dispatch(exact(batch.shape) if size is None else Descriptor(mode=GraphMode.PIECEWISE, num_tokens=size))
        if batch.uniform_query_len == 1:
            return Dispatch(Descriptor(mode=GraphMode.FULL, num_tokens=5, num_requests=5))
        return Dispatch(Descriptor(mode=GraphMode.PIECEWISE, num_tokens=-(-batch.num_tokens // 8) * 8))

    def run(self, dispatch: Dispatch, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return torch.zeros(dispatch.num_tokens, 1, device=self._device)


def make_plan_runner(
    seed: int,
    *,
    decode_in_graph: bool,
    piecewise_decodes: bool = False,
    device: torch.device | str = "cpu",
    ops: StepOps | None = None,
) -> ModelRunner:
    config = RunnerConfig(
        max_num_requests=ROWS,
        max_num_tokens=TOKENS,
        max_model_len=LENGTH,
        block_size=BLOCK,
        num_blocks=1000,
        decode_in_graph=decode_in_graph,
        replay_steps=MOST_STEPS,
    )
    forward = PaddedForward(device, piecewise_decodes=piecewise_decodes)
    return ModelRunner(NoModel(seed).to(device), config, backend=PlainAttention, forward=forward, ops=ops)


@dataclass
class Known:
    """A request as the test knows it, without any persistent state."""

    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    stops: frozenset[int]
    computed: int = 0
    prefill_len: int = 0
    blocks: list[int] = field(default_factory=list)
    ended: bool = False  # it has sampled a stop token: the next plan finishes it

    @property
    def decodes(self) -> bool:
        return self.computed >= self.prefill_len


class World:
    """Makes random valid plans and remembers what they mean."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.running: dict[str, Known] = {}
        self.preempted: dict[str, Known] = {}
        self.count = 0

    def plan(self) -> StepPlan:
        chance = self.chance
        finished = {name for name, r in self.running.items() if r.ended or len(r.tokens) >= LENGTH or chance.random() < 0.05}
        preempted = {name for name in self.running if name not in finished and chance.random() < 0.05}
        for name in finished:
            del self.running[name]
        self.preempted |= {name: self.running.pop(name) for name in preempted}
        decodes = [name for name, r in self.running.items() if r.decodes and chance.random() < 0.8]
        if decodes and chance.random() < 0.5:
            return self._decodes(decodes, finished, preempted)
        scheduled: dict[str, int] = {}
        cached = [self._cached(name, scheduled) for name in list(self.running) if chance.random() < 0.8]
        new = self._arrivals(preempted, scheduled)
        items = list(scheduled.items())
        chance.shuffle(items)
        return StepPlan(
            new_requests=tuple(new),
            cached_requests=tuple(c for c in cached if c is not None),
            num_scheduled_tokens=dict(items),
            finished_request_ids=frozenset(finished),
            preempted_request_ids=frozenset(preempted),
        )

    def take(self, plan: StepPlan, sampled: dict[str, tuple[int, ...]]) -> None:
        """The tokens of the plan's step."""
        for name, tokens in sampled.items():
            known = self.running[name]
            known.computed += plan.num_scheduled_tokens[name] + plan.num_steps - 1
            known.tokens += tokens
            known.ended = bool(known.stops.intersection(tokens))

    def _decodes(self, names: list[str], finished: set[str], preempted: set[str]) -> StepPlan:
        """Nothing but decodes, perhaps several steps of them."""
        room = min(LENGTH - len(self.running[name].tokens) for name in names)
        num_steps = self.chance.randint(1, max(1, min(MOST_STEPS, room - 1)))
        self.chance.shuffle(names)
        changes = []
        for name in names:
            known = self.running[name]
            added = self._need(known, num_steps)
            new_block_ids = (tuple(added),) if added else ()
            changes.append(CachedRequest(request_id=name, num_computed_tokens=known.computed, new_block_ids=new_block_ids))
        return StepPlan(
            cached_requests=tuple(changes),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            finished_request_ids=frozenset(finished),
            preempted_request_ids=frozenset(preempted),
            num_steps=num_steps,
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

    def _arrivals(self, just_preempted: set[str], scheduled: dict[str, int]) -> list[NewRequest]:
        chance, new = self.chance, []
        budget = TOKENS - sum(scheduled.values())
        while len(self.running) < ROWS and budget > 0 and chance.random() < 0.6:
            name, known = self._arrival(just_preempted)
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
                    sampling=known.sampling,
                    stop_token_ids=known.stops,
                )
            )
        return new

    def _arrival(self, just_preempted: set[str]) -> tuple[str, Known]:
        back = [name for name in self.preempted if name not in just_preempted]
        if back and self.chance.random() < 0.5:
            known = self.preempted.pop(back[0])
            known.computed, known.prefill_len, known.blocks = 0, len(known.tokens), []
            return back[0], known
        self.count += 1
        tokens = [self.chance.randrange(VOCAB) for _ in range(self.chance.randint(1, 20))]
        stops = frozenset(self.chance.sample(range(VOCAB), self.chance.randint(0, 3)))
        return f"r{self.count}", Known(tokens, len(tokens), self._sampling(), stops, prefill_len=len(tokens))

    def _sampling(self) -> SamplingParams:
        chance = self.chance
        kind = chance.random()
        if kind < 0.4:
            return SamplingParams()
        temperature, seed = chance.random() + 0.1, chance.randrange(-(2**63), 2**63)
        if kind < 0.85:
            return SamplingParams(temperature=temperature, seed=seed)
        return SamplingParams(temperature=temperature, seed=seed, top_k=chance.randint(1, VOCAB), top_p=0.9, min_p=chance.random() / 10)

    def _need(self, known: Known, count: int) -> list[int]:
        needed = -(-(known.computed + count) // BLOCK) - len(known.blocks)
        used = {block for other in self.running.values() for block in other.blocks}.union(known.blocks)
        added: list[int] = []
        for _ in range(needed):
            block = self.chance.randrange(1, 1000)
            while block in used:
                block = block % 999 + 1
            used.add(block)
            added.append(block)
        known.blocks += added
        return added
